"""The table of commands. What a row names is imported when it is needed, so that `--help` never waits for torch."""

from dataclasses import dataclass, replace
from typing import Any

from rolecall.heavy import import_heavy


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One word behind `rolecall`. Functions and classes are given as "module:name"."""

    name: str
    """The word."""
    about: str
    """What it does, in half a line."""
    options: str
    """Its dataclass of options; an attribute `presets` of it holds nested settings by name."""
    run: str
    """Takes the options and does the work. An int that it returns is the exit code; anything else is 0."""
    plan: str | None = None
    """Takes the options and returns what --dry-run says below the settings."""


def _command(name: str, about: str, options: str, *, trains: bool = False) -> Command:
    """A row whose modules are called as the command is. Those that train run in the same way, and have a plan."""
    module = name.replace("-", "_")
    return Command(
        name=name,
        about=about,
        options=f"rolecall.config.{module}:{options}",
        run=f"rolecall.cli.{'train' if trains else module}:run",
        plan=f"rolecall.config.{module}:plan" if trains else None,
    )


COMMANDS = (
    _command("demo", "SFT, a reward model, PPO and GRPO on the built-in model, in minutes", "DemoOptions"),
    _command("sft", "supervised fine-tuning on demonstrations", "SFTOptions", trains=True),
    _command("rm", "a reward model from preferences", "RMOptions", trains=True),
    _command("rl", "reinforcement learning from a reward", "RLOptions", trains=True),
    _command("dpo", "a policy from preferences, without a reward model", "DPOOptions", trains=True),
    _command("best-of-n", "the best of n answers to every prompt, and what n buys", "BestOfNOptions", trains=True),
    _command(
        "expert-iteration", "rounds of sampling and imitating the good answers", "ExpertIterationOptions", trains=True
    ),
    _command("marl", "agents that learn together: IQL, VDN, QMIX, IPPO, MAPPO", "MARLOptions", trains=True),
    replace(
        _command("audit", "look before training: model, template, rows and reward", "AuditOptions"),
        plan="rolecall.config.rl:plan",
    ),
    _command("rescore", "another reward for the answers a run has stored", "RescoreOptions"),
    _command("eval", "how good a model is on held-out rows", "EvalOptions"),
    _command("generate", "answers from a model, whole or token by token", "GenerateOptions"),
    _command("play", "episodes of several turns, as a conversation or token by token", "PlayOptions"),
    _command("report", "a page to look at a run: curves, and answers token by token", "ReportOptions"),
    _command("push", "a run's model on the Hugging Face hub, with a card made from the run", "PushOptions"),
    _command("conformance", "which cases of masks, returns, KL and losses a library passes", "ConformanceOptions"),
    _command("env", "versions and hardware, to paste into a bug report", "EnvOptions"),
)


def imported(name: str) -> Any:
    """What "module:name" stands for."""
    module, _, attribute = name.partition(":")
    return getattr(import_heavy(module), attribute)
