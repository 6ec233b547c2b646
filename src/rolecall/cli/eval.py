"""`rolecall eval` on the terminal."""

import json
import sys

from rolecall.cli.train import display
from rolecall.config.eval import EvalOptions
from rolecall.jobs.eval import run as evaluate
from rolecall.look.charts import ACCURACY
from rolecall.visible import visible_text


def run(options: EvalOptions) -> int:
    """Print the numbers, and answers if asked."""
    display(quiet=options.json)
    found = evaluate(options)
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
    return 0
