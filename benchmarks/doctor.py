"""Does `rolecall doctor` find faults that were planted, and is it quiet about healthy runs?

    python benchmarks/doctor.py [--place runs/doctor] [--only NAME] [--share 1/2] [--minutes 9] [--no-runs]

Every fault is planted into short real runs, and one run of each is made again with the one setting that the doctor names.
What is there is not made again, so it can be stopped and started; `--share` cuts the list for several processes. Once
every run is there, docs/doctor.md and what each setting did (look/assets/doctor.json) are written from them.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import doctor_planted
from doctor_page import is_made, kind_of, write_page
from doctor_runs import CONTROL_SEEDS, CONTROLS, FAULT_SEEDS, FAULTS, STARTS, TREATED_SEED, Plan

import rolecall
import rolecall.jobs.running
from rolecall.errors import UserError
from rolecall.look.doctor import findings
from rolecall.tasks.names import find_task

ROWS = ("labelled", "mislabelled")


def planned() -> Iterator[tuple[str, Plan, int]]:
    """Every run by name: faults, controls, and one treated run of each fault."""
    for seed in FAULT_SEEDS:
        yield from ((f"{kind}-{seed}", plan, seed) for kind, plan in FAULTS.items())
        if seed in CONTROL_SEEDS:
            yield from ((f"control-{name}-{seed}", plan, seed) for name, plan in CONTROLS.items())
        if seed == TREATED_SEED:
            yield from ((f"treated-{name}-{seed}", plan, seed) for name, plan in FAULTS.items() if plan.shows)


def named_setting(run: Path, kind: str, plan: Plan) -> dict[str, Any]:
    """What the doctor says to try first in a run with this fault, as settings; the plan's where it cannot be typed."""
    said = next((one.setting for one in findings(run) if one.kind == kind), None)
    if plan.treated:
        return plan.treated
    if said is None:
        raise SystemExit(f"{kind} is not found in {run}, so there is no setting to try: choose another TREATED_SEED")
    name, value = said.removeprefix("--").split()
    parts = [_read(part) for part in value.split(",")]
    return {name: parts if len(parts) > 1 else parts[0]}


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def make(place: Path, name: str, plan: Plan, seed: int, changed: dict[str, Any]) -> None:
    """One run; what only weighs on the disk is removed."""
    out = place / name
    settings: dict[str, Any] = {"save.every": 0, "seed": seed, **plan.settings, **changed}
    if plan.job in ("best_of_n",):
        settings.pop("save.every")
    if plan.start is not None:
        settings["model"] = str(place / "starts" / plan.start)
    for key, target in (("rows", "rows"), ("eval.data", "eval_data")):
        if settings.get(key) in ROWS:
            rows = [dict(row) for row in find_task("sorting:length=3").rows("train", n=64, seed=seed)]
            settings[target] = doctor_planted.mislabelled(rows) if settings.pop(key) == "mislabelled" else rows
    begun, why = time.process_time(), ""
    try:
        with plan.planted():
            getattr(rolecall, plan.job)(out=str(out), overwrite=True, quiet=True, **settings)
    except UserError as error:
        why = str(error)
    for folder in ("model", "checkpoints"):
        shutil.rmtree(out / folder, ignore_errors=True)
    if out.is_dir():
        (out / "made.json").write_text(
            json.dumps({"seconds": time.process_time() - begun, "ended": why, "changed": changed})
        )
    print(f"{name}: {time.process_time() - begun:.1f} s {why}", flush=True)


def make_all(place: Path, only: str, *, share: tuple[int, int], minutes: float) -> None:
    """Starts, then every run of this share whose name begins so, until the time is over."""
    rolecall.jobs.running.report_at_the_end = lambda run: None  # pages of these runs are not looked at
    begun = time.monotonic()
    for name, settings in STARTS.items():
        if not (place / "starts" / name / "model").is_dir():
            out = str(place / "starts" / name)
            rolecall.sft(out=out, overwrite=True, quiet=True, **{"optim.lr": 2e-3, "save.every": 0, **settings})
    part, of = share
    for name, plan, seed in list(planned())[part - 1 :: of]:
        if time.monotonic() - begun > 60 * minutes:
            return
        bare = name.removeprefix("treated-").removeprefix("control-")
        if not bare.startswith(only) or is_made(place / name):
            continue
        changed = {}
        if name.startswith("treated-"):
            if not is_made(place / bare):  # still to come from another share
                continue
            changed = named_setting(place / bare, kind_of(bare.rpartition("-")[0]), plan)
        make(place, name, plan, seed, changed)


def _share(text: str) -> tuple[int, int]:
    part, _, of = text.partition("/")
    return int(part), int(of)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", type=Path, default=Path("runs/doctor"))
    parser.add_argument("--only", default="", help="runs whose name begins so")
    parser.add_argument("--share", type=_share, default=(1, 1), help="2/3: the second third of the runs")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after that")
    parser.add_argument("--no-runs", action="store_true", help="only the page")
    options = parser.parse_args()
    if not options.no_runs:
        make_all(options.place, options.only, share=options.share, minutes=options.minutes)
    missing = [name for name, _, _ in planned() if not is_made(options.place / name)]
    if missing:
        print(f"{len(missing)} runs are missing, the first of them {missing[0]}; the page is not written")
    else:
        write_page(options.place)


if __name__ == "__main__":
    main()
