"""Make the results of language models anew and write docs/results.md: `python benchmarks/results.py [--quick]`.

Each experiment and seed is an ordinary run under runs/results; what is finished is not run again, what was interrupted
goes on. The page is written from finished runs only and names what is missing.

    --quick          one seed instead of three
    --only NAME      only this experiment (may be given several times)
    --page           run nothing, only write the page
    --validation     evaluate on problems of the training split, under runs/results-validation: for choosing settings
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does: read when torch is imported

import results_page
import results_smollm2
import results_trl_side
from results_runs import Place, preferences, presets, rules

EXPERIMENTS: dict[str, Callable[[Place, int], None]] = {
    "presets": presets,
    "rules": rules,
    "preferences": preferences,
    "trl": results_trl_side.compare,
    "smollm2": results_smollm2.learn,
}
SEEDS = (0, 1, 2)


def main() -> None:
    """Run what is not finished, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", choices=list(EXPERIMENTS), default=[])
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--validation", action="store_true")
    given = parser.parse_args()
    here = Path(__file__).parents[1]
    place = Place(
        root=here / "runs" / ("results-validation" if given.validation else "results"), validation=given.validation
    )
    begun = time.monotonic()
    for name, work in EXPERIMENTS.items() if not given.page else ():
        if given.only and name not in given.only:
            continue
        for seed in SEEDS[:1] if given.quick else SEEDS:
            since = time.monotonic()
            print(f"{name}, seed {seed} …", flush=True)
            work(place, seed)
            _add_time(place, name, time.monotonic() - since)
            print(f"{name}, seed {seed}: {time.monotonic() - since:.0f} s", flush=True)
    if given.validation:
        print(f"runs lie in {place.root}; the page is written from held-out problems only")
        return
    missing = results_page.write(place, here / "docs")
    print(f"{here / 'docs' / 'results.md'} written; in all {(time.monotonic() - begun) / 60:.1f} minutes")
    for name in missing:
        print(f"missing: {name}")


def _add_time(place: Place, name: str, seconds: float) -> None:
    """Minutes spent per experiment, over all starts of this script."""
    path = place.at("seconds.json")
    held = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**held, name: held.get(name, 0.0) + seconds}, indent=1))


if __name__ == "__main__":
    main()
