"""What commands print that use models and runs: a few lines each. What a command needs is imported when it runs."""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from shlex import quote
from textwrap import indent
from typing import Any

from rolecall.cli.progress import display
from rolecall.config.use import (
    KEY_VARIABLE,
    ConformanceOptions,
    DoctorOptions,
    EnvOptions,
    EvalOptions,
    ProposeOptions,
    PushOptions,
    ReportOptions,
    RescoreOptions,
    ServeOptions,
)
from rolecall.config.view import ViewOptions
from rolecall.visible import visible_text


def env(options: EnvOptions) -> None:
    """A `name: value` line for each fact about this machine."""
    from rolecall.jobs.env import environment

    facts = environment()
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name + ':':{width + 1}} {value}")


def evaluate(options: EvalOptions) -> None:
    """The numbers, and answers if they are wanted."""
    from rolecall.jobs.eval import run
    from rolecall.look.charts import ACCURACY

    display(quiet=options.json)
    found = run(options)
    for prompt, answer, score in list(zip(found.prompts, found.answers, found.scores, strict=True))[: options.show]:
        shown = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        print(f"{visible_text(shown)} -> {visible_text(answer)}  ({'failed' if score is None else f'{score:g}'})")
    if options.json:
        print(json.dumps(found.numbers))
    else:
        width = max(map(len, found.numbers))
        for name, value in found.numbers.items():
            graded = name == "accuracy" and any(score not in (0, 1, None) for score in found.scores)
            print(f"{name:{width}}  {value:.4f}{f'  ({ACCURACY})' if graded else ''}")
    if found.numbers["failed"]:
        print(f"{found.numbers['failed']:.1%} of the rewards failed", file=sys.stderr)


def serve(options: ServeOptions) -> None:
    """Where the server is, and how to sample from it."""
    from rolecall.jobs.serve import Serving, run

    def ready(serving: Serving) -> None:
        print(f"serving {visible_text(serving.model)} ({serving.engine}, {serving.dtype}) on {serving.url}")
        if serving.own_key:
            print(f"export {KEY_VARIABLE}={serving.key}")
        print(f"train with: rolecall rl --model {quote(serving.model)} --engine.servers {serving.url}")
        sys.stdout.flush()
        if not serving.loopback:
            print("others can reach this address: the key and all tokens travel in the clear", file=sys.stderr)

    display(quiet=False)
    run(options, ready)


def rescore(options: RescoreOptions) -> None:
    """What came out, and how to train on it."""
    from rolecall.jobs.rescore import run_from

    found = run_from(options, progress=display(quiet=options.quiet))
    if not options.quiet:
        before, after = ("none" if mean is None else f"{mean:.4f}" for mean in (found.before, found.after))
        print(f"{found.answers} answers of {found.steps} steps: mean score {before} -> {after}")
        print(f"run: {found.path}")
        print(f"train on it with: rolecall rl --from {quote(str(found.path))}")
    if found.failed:
        print(f"{found.failed} of {found.answers} rewards failed", file=sys.stderr)


def report(options: ReportOptions) -> None:
    """Where the page lies."""
    from rolecall.jobs.report import report

    made = report(*options.run, out=options.out, png=options.png)
    print(f"report: {made.path} ({made.path.stat().st_size / 1e3:,.0f} kB)")
    if made.pictures:
        print(f"curves: {len(made.pictures)} pictures in {made.path.parent / 'curves'}")


def doctor(options: DoctorOptions) -> int:
    """The findings; 1 if there are any."""
    from rolecall.jobs.doctor import doctor

    found = doctor(options.run)
    if options.json:
        print(json.dumps([asdict(one) for one in found]))
        return int(bool(found))
    for one in found:
        print(f"{one.kind} ({one.sure}), steps {one.steps[0]} to {one.steps[1]}")
        places = [f"step {s} answer {i}{'' if t is None else f' token {t}'}" for s, i, t in one.evidence]
        lines = [one.sentence, *([f"see: {', '.join(places)}"] if places else []), f"try: {one.setting}"]
        lines = [visible_text(line) for line in (*lines, f"in our run with this fault: {one.did}")]
        print(indent("\n".join(lines), "  "), end="\n\n")
    what = f"{len(found)} finding{'s' if len(found) > 1 else ''}" if found else "nothing found"
    print(f"{options.run}: {what}; an audit of what is recorded, not a prophecy (docs/doctor.md)")
    return int(bool(found))


def push(options: PushOptions) -> None:
    """Where the folder and the model are."""
    from rolecall.jobs.push import push

    made = push(options.run, options.repo, private=options.private, out=options.out, dry_run=options.dry_run)
    size = sum(file.stat().st_size for file in made.folder.iterdir())
    print(f"folder: {made.folder} ({len(list(made.folder.iterdir())) - 1} files, {size / 1e6:,.1f} MB)")
    print(f"model: {made.url}" if made.url else "nothing was uploaded; leave out --dry-run to do it")


def propose(options: ProposeOptions) -> None:
    """How many rows were kept, and why the others were not."""
    from rolecall.jobs.propose import run

    made = run(options)
    if options.json:
        print(json.dumps(asdict(made) | {"path": str(made.path)}))
        return
    for why, count in made.dropped.items():
        print(f"{count:6} dropped: {why}")
    print(f"{made.made:6} new rows, plus {made.given} given ones: {made.path}")


def conformance(options: ConformanceOptions) -> int:
    """How the adapter did; 1 if something differs."""
    from rolecall.conformance.run import DIFFERS, run_cases

    with redirect_stdout(sys.stderr):  # libraries print while they are imported
        found = run_cases(options.adapter)
    if options.json:
        print(json.dumps(asdict(found)))
    else:
        _show_cases(found)
    return 1 if found.count(DIFFERS) else 0


def _show_cases(found: Any) -> None:
    from rolecall.conformance.run import DIFFERS, NOT_OFFERED, OUTCOMES

    print(", ".join(f"{name} {version}" for name, version in found.versions.items()), end="\n\n")
    sections = list(dict.fromkeys(result.section for result in found.results))
    print(f"{'':12}", *(f"{outcome:>11}" for outcome in OUTCOMES))
    for section in (*sections, None):
        counts = (f"{found.count(outcome, section):11}" for outcome in OUTCOMES)
        print(f"{section or 'all':12}", *counts)
    for result in found.results:
        if result.outcome == DIFFERS:
            lines = [result.about, result.said, *([result.reason] if result.reason else [])]
            print(f"\n{result.section}: {result.case} differs", indent("\n".join(lines), "  "), sep="\n")
    if found.not_offered:
        print(f"\n{NOT_OFFERED} at all: {', '.join(found.not_offered)}")
    if found.idle_reasons:
        print(f"\nREASONS that are not needed, since nothing differs: {', '.join(found.idle_reasons)}")


def view(options: ViewOptions) -> None:
    """The address to open; Ctrl-C ends it."""
    from rolecall.jobs.view import view

    def ready(address: str) -> None:
        print(f"the runs in {visible_text(options.dir)}: {address}\nCtrl-C ends it", flush=True)

    view(options.dir, port=options.port, ready=ready)
