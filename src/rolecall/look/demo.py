"""What a demo says of itself: which runs it made, and how they compare."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolecall.errors import UserError
from rolecall.look.charts import is_number
from rolecall.look.page import table
from rolecall.look.run import read_object

_NAME = re.compile(r"[a-z][a-z0-9-]*")


def demo_runs(path: Path) -> list[str]:
    """The folders of a demo's runs. Only names that lie right inside it, whatever the file says."""
    names = read_object(path / "demo.json").get("runs")
    if not isinstance(names, list) or not all(isinstance(n, str) and _NAME.fullmatch(n) for n in names):
        raise UserError(f"{path / 'demo.json'} does not name the demo's runs; bring back a whole copy of it")
    return names


def demo_table(about: Mapping[str, Any]) -> str:
    """The policies side by side, and their answers to problems that the first got wrong."""
    stages = [stage for stage in about.get("stages", []) if isinstance(stage, dict)]
    names = [name for name in ("accuracy", "avg@4") if any(name in s.get("numbers", {}) for s in stages)]
    titles = {"accuracy": "greedy", "avg@4": "sampled"}
    rows = [
        (
            stage.get("name", "?"),
            stage.get("learns_from", ""),
            *(_share(stage.get("numbers", {}).get(name)) for name in names),
            f"{stage.get('seconds', 0):.0f} s",
        )
        for stage in stages
    ]
    caption = f"Right answers to {about.get('rows', '?')} held-out {about.get('task', '')} problems"
    shown = table(["run", "learns from", *(titles[n] for n in names), "time"], rows, numbers=2, caption=caption)
    answers = [row for row in about.get("answers", []) if isinstance(row, dict)]
    if not answers:
        return shown
    head = ["prompt", *(str(stage.get("name")) for stage in stages), "right answer"]
    lines = [(row.get("prompt"), *row.get("answers", []), row.get("gold")) for row in answers]
    beside = table(head, lines, caption="Answers to problems that the start got wrong")
    return f'<div class="tables">{shown}{beside}</div>'


def _share(value: Any) -> str:
    return f"{100 * value:.1f} %" if is_number(value) else "–"
