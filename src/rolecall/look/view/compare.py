"""Pages of several runs together."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from markupsafe import Markup

from rolecall.look.compare import groups_of
from rolecall.look.compare_page import differences_table, ends_table, lead_of_groups
from rolecall.look.page import data_block
from rolecall.look.records import unit_of
from rolecall.look.run import RunFiles
from rolecall.look.same_prompts import key_of, shared_prompts, side_by_side
from rolecall.look.tokens import token_view

if TYPE_CHECKING:
    from rolecall.look.view.pages import Pages


def comparison(pages: "Pages", ids: Sequence[str]) -> dict[str, Any]:
    """What the page of a comparison shows."""
    runs = read_compared(pages, ids)
    groups = groups_of(runs)
    summaries = [pages.runs.summary(run, pages.path(run)) for run in ids]
    return {
        "runs": summaries,
        "running": any(run.state == "running" for run in summaries),
        "lead": Markup(lead_of_groups(groups)),
        "ends": Markup(ends_table(groups)),
        "differences": Markup(differences_table(groups)),
        "shared": len(shared_prompts(runs)),
        "curves": compare_address("/compare/curves", ids),
        "answers": compare_address("/compare/answers", ids),
        "paths": [shlex.quote(pages.shown(run.path)) for run in runs.values()],
    }


def same_prompt(pages: "Pages", ids: Sequence[str], key: str) -> dict[str, Any]:
    """The answers of all runs to one prompt; the first if the key is none of theirs."""
    runs = read_compared(pages, ids)
    shared = shared_prompts(runs)
    up = compare_address("/compare", ids)
    if not shared:
        return {"up": up, "view": "", "data": ""}
    keys = [key_of(prompt) for prompt in shared]
    at = keys.index(key) if key in keys else 0
    prompt = list(shared)[at]
    html, data = token_view(
        "view", [side_by_side(runs, prompt, shared[prompt])], unit=unit_of(next(iter(runs.values())))
    )

    def address(i: int) -> str:
        return compare_address("/compare/answers", ids, prompt=keys[i]) if 0 <= i < len(keys) else ""

    return {
        "up": up,
        "number": at + 1,
        "count": len(keys),
        "previous": address(at - 1),
        "next": address(at + 1),
        "view": Markup(html),
        "data": Markup(data_block(data)),
    }


def compare_address(path: str, ids: Sequence[str], **more: str) -> str:
    """The address of a comparison, or of something of it."""
    given = [("run", run) for run in ids] + list(more.items())
    return f"{path}?{urlencode(given)}"


def read_compared(pages: "Pages", ids: Sequence[str]) -> dict[str, RunFiles]:
    """The runs by their names."""
    held = {run: pages.path(run) for run in ids}
    return {pages.runs.summary(run, path).name: pages.files(path) for run, path in held.items()}
