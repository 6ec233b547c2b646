"""RL post-training for language models and agents in which every token answers to its role."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolecall.jobs.audit import audit as audit
    from rolecall.jobs.best_of_n import best_of_n as best_of_n
    from rolecall.jobs.demo import demo as demo
    from rolecall.jobs.diff import diff as diff
    from rolecall.jobs.doctor import doctor as doctor
    from rolecall.jobs.dpo import dpo as dpo
    from rolecall.jobs.eval import eval as eval
    from rolecall.jobs.expert_iteration import expert_iteration as expert_iteration
    from rolecall.jobs.generate import generate as generate
    from rolecall.jobs.marl import marl as marl
    from rolecall.jobs.play import play as play
    from rolecall.jobs.push import push as push
    from rolecall.jobs.report import report as report
    from rolecall.jobs.rescore import rescore as rescore
    from rolecall.jobs.rl import rl as rl
    from rolecall.jobs.rm import rm as rm
    from rolecall.jobs.sft import sft as sft
    from rolecall.train.callbacks import Callback as Callback

__version__ = "0.1.0"

_JOBS = (
    "audit",
    "best_of_n",
    "demo",
    "diff",
    "doctor",
    "dpo",
    "eval",
    "expert_iteration",
    "generate",
    "marl",
    "play",
    "propose",
    "push",
    "report",
    "rescore",
    "rl",
    "rm",
    "sft",
)
"""Functions of `rolecall.jobs`, a module each, that are imported (and torch with them) when first asked for."""


def __getattr__(name: str) -> Any:
    from rolecall.heavy import import_heavy

    if name == "Callback":
        return import_heavy("rolecall.train.callbacks").Callback
    if name not in _JOBS:
        raise AttributeError(f"module 'rolecall' has no attribute {name!r}")
    _import_tqdm_quietly()
    return getattr(import_heavy(f"rolecall.jobs.{name}"), name)


def _import_tqdm_quietly() -> None:
    """In a notebook without ipywidgets, tqdm warns in red of bars that nobody asked for."""
    import sys
    import warnings
    from importlib import import_module

    if "ipykernel" in sys.modules and "tqdm.auto" not in sys.modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module("tqdm.auto")


def __dir__() -> list[str]:
    return sorted([*globals(), *_JOBS, "Callback"])
