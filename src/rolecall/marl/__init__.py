"""Multi-agent episodes: batches with a role for every agent and step, environments, runners, networks, learners.

`rolecall.marl(env=…, algo=…)` is the job of the same name.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Job(ModuleType):
    """This package when it is called: package and job share one name, and importing the one must not hide the other."""

    def __call__(self, **settings: Any) -> Any:
        return import_module("rolecall.jobs.marl").marl(**settings)


sys.modules[__name__].__class__ = _Job
