"""docs/doctor.md and look/assets/doctor.json, from the runs of benchmarks/doctor.py."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doctor_runs import CONTROL_SEEDS, CONTROLS, FAULT_SEEDS, FAULTS, FIRST_UNSEEN, TREATED_SEED

from rolecall.errors import UserError
from rolecall.look.charts import is_number
from rolecall.look.doctor import Finding, findings
from rolecall.look.doctor.audit import CHECKS
from rolecall.look.run import read_run

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "doctor.md"
DID = ROOT / "src" / "rolecall" / "look" / "assets" / "doctor.json"

HEAD = """# What looks wrong with a run

```bash
rolecall doctor runs/first
```

reads the files of a run, after it or while it goes on, and says what looks wrong: how sure that is, the steps, the answers and
tokens that show it (step, row in that step's [rollouts file](files.md), token), the one setting to try first, and what that
setting did when we planted the same fault into a run of our own. The exit code is 1 if something is found and 0 if not; `--json`
prints a list. In Python it is `rolecall.doctor("runs/first")`. Reports have the same findings as a table, and their steps shaded in the curves.

It is an audit of what is recorded, not a prophecy: a run in which nothing is found may still learn nothing, and a finding says
that numbers look as they did in runs with that fault. What it cannot see it does not judge: without a reference there is no KL,
without evaluations no falling evaluation, without records (`save.rollouts 0`) no answers.
"""

MEASURED = """## How often it is right

`python benchmarks/doctor.py` plants each fault into short real runs of the built-in model ({steps} steps, seconds each), trains
healthy controls of {controls} kinds (presets, rewards of several parts, precisions, LoRA, replay, agents, multi-agent, imitation,
preferences, reward models, some long enough to get much better at their task), and writes this page from what it finds in them.
Checks and thresholds were set on even seeds and are reported on odd ones:

- On even seeds the runs themselves were set up too: entropy-collapse, no-tool-calls and phantom-advantages are planted more strongly
  than at first; the control of PPO got a critic of its own after the doctor called the shared one useless (its explained variance was
  below 0), and controls that learn got a smaller learning rate after theirs had ruined the policy. So few false alarms on even
  seeds say little.
- Odd seeds below 10 are not all unseen. At seed 1 a first pass missed stale-replay and idle-agent; both checks were then changed by
  what seed 0 shows, and idle-agent is planted for more steps. flat-groups was false in some controls in which nearly all answers are
  right; it now asks whether most of the flat groups are below the best score, which can only take findings away. The reward that
  makes groups flat was changed after its treated run at seed 1, since no amount of resampling could help.
- Seeds from {unseen} on were first looked at by the run of the script that wrote this page; nothing was changed after it. Their column is
  the one to judge by.
- The settings to try were made stronger where the first choice did nothing (KL coefficients of 1, not 0.1; replay of age 1), with
  trials at seed 0. What a setting did is from one run each, at seed {treated}, at which all faults were found.
"""

LIMITS = """## What these numbers are not

Faults are planted so that they show within a few steps, one at a time, in a model of a million weights on toy tasks; milder ones are
found later or not at all, and thresholds in nats or shares may be too tight or too loose for a large model. A planted run often
has further findings, such as answers that no longer stop where length pays; they are true of the run, and not counted here.
Most control runs are short; a false alarm is counted for a run with any finding, whatever its kind.
"""


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What was found in one run."""

    name: str
    seed: int
    found: tuple[Finding, ...]

    @property
    def kinds(self) -> set[str]:
        """The kinds of what was found."""
        return {one.kind for one in self.found}


def is_made(run: Path) -> bool:
    """Whether the run was made to its end."""
    return (run / "made.json").is_file()


def kind_of(fault: str) -> str:
    """The check that must find a fault."""
    return fault.partition("+")[0]


def look(place: Path, names: Iterable[str], seeds: Sequence[int], prefix: str = "") -> list[Looked]:
    """All runs that are there."""
    out = []
    for name in names:
        for seed in sorted(seeds):
            run = place / f"{prefix}{name}-{seed}"
            if is_made(run):
                try:
                    found = tuple(findings(run))
                except UserError as error:
                    raise SystemExit(f"{run}: {error}") from error
                out.append(Looked(name=name, seed=seed, found=found))
    return out


def write_page(place: Path) -> None:
    """Look at all runs, say what the settings did, and write the page."""
    did = {kind_of(name): said for name in FAULTS if (said := what_it_did(place, name)) is not None}
    DID.write_text(json.dumps(did, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    faults, controls = look(place, FAULTS, FAULT_SEEDS), look(place, CONTROLS, CONTROL_SEEDS, "control-")
    parts = [
        HEAD,
        _checks(place, did),
        MEASURED.format(steps=_steps(), controls=len(CONTROLS), unseen=FIRST_UNSEEN, treated=TREATED_SEED),
        _rates(faults, controls),
        _by_fault(faults),
        _by_control(controls),
        LIMITS,
    ]
    PAGE.write_text("\n".join(parts), encoding="utf-8")


def what_it_did(place: Path, name: str) -> str | None:
    """A sentence about the treated run of a fault; None if it has none."""
    plan, sick = FAULTS[name], place / f"{name}-{TREATED_SEED}"
    treated = place / f"treated-{name}-{TREATED_SEED}"
    if not plan.shows or not is_made(treated):
        return None
    changed = json.loads((treated / "made.json").read_text()).get("changed", {})
    flags = " ".join(f"--{key} {_flag(value)}" for key, value in changed.items())
    numbers = [_ends(show, _end(treated, show), _end(sick, show)) for show in plan.shows]
    before, after = ({one.kind for one in findings(run)} for run in (sick, treated))
    still = kind_of(name) in after
    said, new = "still found" if still else "not found any more", ", ".join(sorted(after - before))
    if new:
        said += f", {'and so' if still else 'but'} {'were' if len(after - before) > 1 else 'was'} {new}"
    return f"with {flags}, {' and '.join(numbers)}; it was {said}"


def _ends(name: str, treated: str | None, sick: str | None) -> str:
    if treated is None:
        return f"{name}, at {sick} before, is not logged any more"
    return f"{name} ended at {treated} instead of {sick}"


def _flag(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _end(run: Path, name: str) -> str | None:
    """The mean of the last three steps, or the last evaluation."""
    files = read_run(run)
    lines = files.evaluations[-1:] if name.startswith("eval_") else files.steps[-3:]
    # What environments count is left out of the steps in which none counted any.
    values = [line.get(name, 0.0 if name.startswith("agents/") else None) for line in lines]
    numbers = [float(value) for value in values if is_number(value)]
    return f"{sum(numbers) / len(numbers):.2g}" if numbers else None


def _checks(place: Path, did: dict[str, str]) -> str:
    lines = ["## What is looked for", "", "| finding | found if | what the setting did in our run |", "|---|---|---|"]
    for check in CHECKS:
        kind = check.__name__.replace("_", "-")
        lines.append(f"| {kind} | {' '.join((check.__doc__ or '').split())} | {did.get(kind, 'not tried')} |")
    return "\n".join([*lines, ""])


def _steps() -> str:
    steps = [plan.settings["steps"] for plan in [*FAULTS.values(), *CONTROLS.values()] if "steps" in plan.settings]
    return f"{min(steps)} to {max(steps)}"


def _parts(seeds: Iterable[int]) -> dict[str, list[int]]:
    """The columns of the tables, as far as there are runs: which seeds belong to each."""
    columns = {
        "set on: {}": [s for s in seeds if s % 2 == 0],
        "reported: {}": [s for s in seeds if s % 2 and s < FIRST_UNSEEN],
        "reported, unseen: {}": [s for s in seeds if s % 2 and s >= FIRST_UNSEEN],
    }
    named = {
        held_as: f"seed{'s' * (len(held) > 1)} {', '.join(map(str, sorted(held)))}" for held_as, held in columns.items()
    }
    return {name.format(named[name]): held for name, held in columns.items() if held}


def _rates(faults: Sequence[Looked], controls: Sequence[Looked]) -> str:
    parts = []
    for title, runs, seeds, counts in (
        ("planted faults found", faults, FAULT_SEEDS, lambda one: kind_of(one.name) in one.kinds),
        ("healthy runs with a finding", controls, CONTROL_SEEDS, lambda one: bool(one.found)),
    ):
        columns = _parts(seeds)
        cells = [_share([counts(one) for one in runs if one.seed in held]) for held in columns.values()]
        parts += [_row(["", *columns]), "|---|" + "---:|" * len(columns), _row([title, *cells]), ""]
    return "\n".join(parts)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _share(held: Sequence[bool]) -> str:
    return f"{sum(held)} of {len(held)} ({100 * sum(held) / len(held):.1f} %)"


def _by_fault(faults: Sequence[Looked]) -> str:
    columns = _parts(FAULT_SEEDS)
    lines = [_row(["planted", "in a run of", *columns]), "|---|---|" + "---:|" * len(columns)]
    for name, plan in FAULTS.items():
        what = plan.settings.get("env") or plan.settings.get("algo") or plan.settings.get("preset") or "grpo"
        what = plan.job if plan.job == "sft" else what
        what = f"{what}, one optimiser step" if name.endswith("+plain") else what
        runs = {one.seed: kind_of(name) in one.kinds for one in faults if one.name == name}
        cells = [f"{sum(runs[s] for s in held)} of {len(held)}" for held in columns.values()]
        lines.append(_row([kind_of(name), what, *cells]))
    return "\n".join([*lines, ""])


def _by_control(controls: Sequence[Looked]) -> str:
    lines = [f"Healthy runs, {len(CONTROL_SEEDS)} seeds of each:", "", f"{', '.join(CONTROLS)}."]
    wrong = [one for one in controls if one.found]
    said = "; ".join(f"{one.name}, seed {one.seed}: {', '.join(sorted(one.kinds))}" for one in wrong)
    lines += ["", f"Counted as false alarms: {said}." if wrong else "There was no false alarm."]
    if wrong:
        lines[-1] += " What they say of the numbers is true of these runs; nothing was planted in them."
    return "\n".join([*lines, ""])
