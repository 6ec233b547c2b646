"""Two GRPO steps with a tiny random model of every causal family in transformers; writes the table in docs/models.md.

python benchmarks/families.py            all of them, some ten minutes on one core
python benchmarks/families.py mamba opt  these only, printed and not written
"""

import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "recipes"))

from family_models import FAMILIES, check_family, tiny_of  # noqa: E402

from rolecall.errors import UserError  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
WORKS, REFUSED, NOT_BUILT, WRONG = "two steps taken", "refused", "not built here", "WRONG"


def outcome(family: str) -> tuple[str, str]:
    """(what happened, in words)."""
    try:
        tiny_of(family)
    except Exception as error:
        return NOT_BUILT, _line(error)
    with tempfile.TemporaryDirectory() as directory:
        try:
            how = check_family(family, Path(directory))
        except UserError as error:
            why = _line(error).partition("cannot be trained here: ")[2]
            return (REFUSED, why) if why else (WRONG, _line(error))
        except Exception as error:
            return WRONG, _line(error)
    return WORKS, how


def table(found: dict[str, tuple[str, str]]) -> str:
    """The part of the page."""
    counts = Counter(result for result, _ in found.values())
    lines = [
        f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}, float32 on a CPU: "
        f"{counts[WORKS]} of {len(found)} families took two GRPO steps"
        + "".join(f", {counts[kind]} {kind}" for kind in (REFUSED, NOT_BUILT, WRONG) if counts[kind])
        + ".",
        "",
    ]
    for how in sorted({words for result, words in found.values() if result == WORKS}, reverse=True):
        names = [f for f, (result, words) in found.items() if (result, words) == (WORKS, how)]
        lines += [f"With {how}: " + ", ".join(f"`{name}`" for name in names) + ".", ""]
    lines += ["| family | result | why |", "|---|---|---|"]
    lines += [f"| `{f}` | {result} | {words} |" for f, (result, words) in found.items() if result != WORKS]
    return "\n".join(lines)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()).replace("|", "/")
    return text[:220] + ("…" if len(text) > 220 else "")


def main() -> None:
    """Try every family, or those named."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    found = {}
    for family in sys.argv[1:] or FAMILIES:
        found[family] = outcome(family)
        print(family, *found[family], sep="\t", flush=True)
    if not sys.argv[1:]:
        page = PAGE.read_text(encoding="utf-8")
        head, _, rest = page.partition(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n{table(found)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
