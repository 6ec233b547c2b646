"""A finding, with what its setting did in our own run."""

import json
from functools import cache
from importlib.resources import files

from rolecall.look.doctor.finding import Finding, Sure
from rolecall.look.doctor.reading import Evidence


def found(kind: str, sure: Sure, steps: tuple[int, int], sentence: str, evidence: Evidence, setting: str) -> Finding:
    """The finding of a check."""
    return Finding(
        kind=kind,
        sure=sure,
        steps=steps,
        sentence=sentence,
        evidence=evidence,
        setting=setting,
        did=_treated().get(kind, "not tried"),
    )


@cache
def _treated() -> dict[str, str]:
    """By kind: what the setting did in the run into which benchmarks/doctor.py planted the fault, which writes the file."""
    held = (files("rolecall.look") / "assets" / "doctor.json").read_text(encoding="utf-8")
    return dict(json.loads(held))
