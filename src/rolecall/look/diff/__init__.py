"""Where runs part, and whether the ends of several seeds differ by more than noise: from the files of the runs alone."""

from rolecall.look.diff.compare import Comparison, PairDifference, compare

__all__ = ["Comparison", "PairDifference", "compare"]
