"""The model card of a run: what it was made from, how it went, and how to make it again."""

import re
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from rolecall.look.charts import ACCURACY, PAIRS, four_digits, is_number, mean_of
from rolecall.look.run import RunFiles
from rolecall.visible import visible_text

SETTINGS = "rolecall.yaml"
"""The run's settings, beside the card."""

_POINTS = 11
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HOW = {
    "sft": "supervised fine-tuning",
    "rm": "training a reward model",
    "rl": "reinforcement learning",
    "dpo": "direct preference optimisation",
    "expert-iteration": "expert iteration",
}
_ANSWERS = ("rl", "expert-iteration")
_SHOWS = ": curves, and answers token by token"


def model_card(run: RunFiles, *, repo: str, base: str | None) -> str:
    """README.md for the hub. `base` is the model that the first of a chain of runs started from."""
    about, config = run.about, run.config
    algorithm = config.get("algorithm") or {}
    how = _HOW.get(run.command, run.command)
    tags = ["rolecall", run.command, *([algorithm["name"]] if "name" in algorithm else [])]
    head: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-classification" if run.command == "rm" else "text-generation",
        "tags": list(dict.fromkeys(tags)),
    }
    for key, name in (("base_model", base), ("datasets", config.get("rows"))):
        if is_hub_id(name):
            head[key] = [name] if key == "datasets" else name
    parts = [
        f"# {markdown(repo.rpartition('/')[2])}",
        f"Made by {how} with rolecall, {run.last_step} step{'s' if run.last_step != 1 else ''}, seed "
        f"{markdown(about.get('seed'))}. `report.html` shows the run{_SHOWS if run.command in _ANSWERS else ''}.",
        _table(["what", "from"], _made_of(run, base)),
        "## Results",
        *_results(run),
        "## Curve",
        *_curve(run),
        "## How to make it again",
        *_again(run),
        "## Settings",
        f"All of them are in `{SETTINGS}`:",
        f"<details><summary>settings</summary>\n\n{_fenced(settings_yaml(run))}\n\n</details>",
    ]
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n\n" + "\n\n".join(parts) + "\n"


def settings_yaml(run: RunFiles) -> str:
    """The settings as a file for `--config`; of an absolute path only the name, which is all that means something elsewhere.

    A run given in passes also knows its number of steps, which is what is repeated: giving both is refused.
    """
    passes = {} if run.command == "expert-iteration" else {"epochs": None}
    config = run.config | {name: value for name, value in passes.items() if name in run.config}
    return str(yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True))


def is_hub_id(name: object) -> bool:
    """Whether a name can only be an id of the hub: not one of a file, a directory or a run here."""
    return isinstance(name, str) and _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def markdown(value: object) -> str:
    """A text that Markdown and HTML leave as it is, on one line."""
    shown = escape(" ".join(visible_text(str(value)).split()), quote=False)
    return re.sub(r"([\\`*_\[\]|#~!])", r"\\\1", shown)


def _made_of(run: RunFiles, base: str | None) -> list[tuple[object, object]]:
    config = run.config
    found: list[tuple[object, object]] = [("base model", _name(base or config.get("model")))]
    for key, word in (("rows", "data"), ("env", "environment"), ("reward", "reward"), ("judge", "judge")):
        if config.get(key):
            held = config[key]
            found.append((word, ", ".join(map(_name, held)) if isinstance(held, list) else _name(held)))
    if run.command in ("rl", "expert-iteration") and not config.get("reward"):
        found.append(("reward", "that of the task or the environment"))
    return found


def _results(run: RunFiles) -> list[str]:
    if not run.evaluations:
        return ["No evaluation was made on held-out rows while it trained."]
    first, last = run.evaluations[0], run.evaluations[-1]
    names = [name for name in last if name.startswith("eval_") and is_number(last[name])]
    rows = [(n.removeprefix("eval_"), four_digits(first.get(n)), four_digits(last[n])) for n in names]
    parts = ["On rows that were not trained on:", _table(["", f"step {first['step']}", f"step {last['step']}"], rows)]
    if "eval_accuracy" in names and run.command not in PAIRS:
        parts.append(f"`accuracy` is {ACCURACY}; `reward` is their mean score.")
    return parts


def _curve(run: RunFiles) -> list[str]:
    name = next((n for n in ("reward", "accuracy", "loss") if any(is_number(s.get(n)) for s in run.steps)), "loss")
    few = max(1, round(len(run.steps) / _POINTS))
    parts = [run.steps[i : i + few] for i in range(0, len(run.steps), few)]
    rows = [(f"{int(p[0]['step'])} to {int(p[-1]['step'])}", four_digits(mean_of(p, name))) for p in parts]
    return [f"Mean {name} of the steps' own batches:", _table(["steps", name], rows)]


def _again(run: RunFiles) -> list[str]:
    about, command = run.about, f"rolecall {run.command} --config {SETTINGS}"
    versions = {"python": about.get("python"), **(about.get("versions") or {})}
    words = [f"{name} {version}" for name, version in versions.items()]
    parts = [f"With {markdown(', '.join(words))}, and `{SETTINGS}` of this repository:", _fenced(command, "bash")]
    arguments = [str(word) for word in about.get("arguments") or ()]
    if arguments[:1] == [run.command]:
        parts += ["It was run as", _fenced(shlex.join(["rolecall", *map(_name, arguments)]), "bash")]
    if "(given in Python)" in str(run.config):
        parts.append(
            "What the settings call `(given in Python)` was handed to `rolecall` from a script, which is not here."
        )
    return parts


def _table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *([markdown(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _fenced(text: str, kind: str = "yaml") -> str:
    """A block that no text in it can end."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{kind}\n{visible_text(text).rstrip()}\n{fence}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(held) for name, held in value.items()}
    if isinstance(value, list):
        return [_plain(held) for held in value]
    return _name(value) if isinstance(value, str) else value


def _name(value: object) -> str:
    return Path(value).name if isinstance(value, str) and value.startswith("/") else str(value)
