"""The table of commands. What a row names is imported when it is needed, so that `--help` never waits for torch."""

from dataclasses import dataclass
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


COMMANDS = (
    Command(
        name="demo",
        about="SFT, a reward model, PPO and GRPO on the built-in model, in minutes",
        options="rolecall.config.demo:DemoOptions",
        run="rolecall.cli.demo:run",
    ),
    Command(
        name="sft",
        about="supervised fine-tuning on demonstrations",
        options="rolecall.config.sft:SFTOptions",
        run="rolecall.cli.train:sft",
        plan="rolecall.config.sft:plan",
    ),
    Command(
        name="rm",
        about="a reward model from preferences",
        options="rolecall.config.rm:RMOptions",
        run="rolecall.cli.train:rm",
        plan="rolecall.config.rm:plan",
    ),
    Command(
        name="rl",
        about="reinforcement learning from a reward",
        options="rolecall.config.rl:RLOptions",
        run="rolecall.cli.train:rl",
        plan="rolecall.config.rl:plan",
    ),
    Command(
        name="dpo",
        about="a policy from preferences, without a reward model",
        options="rolecall.config.dpo:DPOOptions",
        run="rolecall.cli.train:dpo",
        plan="rolecall.config.dpo:plan",
    ),
    Command(
        name="best-of-n",
        about="the best of n answers to every prompt, and what n buys",
        options="rolecall.config.best_of_n:BestOfNOptions",
        run="rolecall.cli.train:best_of_n",
        plan="rolecall.config.best_of_n:plan",
    ),
    Command(
        name="expert-iteration",
        about="rounds of sampling and imitating the good answers",
        options="rolecall.config.expert_iteration:ExpertIterationOptions",
        run="rolecall.cli.train:expert_iteration",
        plan="rolecall.config.expert_iteration:plan",
    ),
    Command(
        name="marl",
        about="agents that learn together: IQL, VDN, QMIX, IPPO, MAPPO",
        options="rolecall.config.marl:MARLOptions",
        run="rolecall.cli.train:marl",
        plan="rolecall.config.marl:plan",
    ),
    Command(
        name="audit",
        about="look before training: model, template, rows and reward",
        options="rolecall.config.audit:AuditOptions",
        run="rolecall.cli.audit:run",
        plan="rolecall.config.rl:plan",
    ),
    Command(
        name="rescore",
        about="another reward for the answers a run has stored",
        options="rolecall.config.rescore:RescoreOptions",
        run="rolecall.cli.rescore:run",
    ),
    Command(
        name="eval",
        about="how good a model is on held-out rows",
        options="rolecall.config.eval:EvalOptions",
        run="rolecall.cli.eval:run",
    ),
    Command(
        name="generate",
        about="answers from a model, whole or token by token",
        options="rolecall.config.generate:GenerateOptions",
        run="rolecall.cli.generate:run",
    ),
    Command(
        name="play",
        about="episodes of several turns, as a conversation or token by token",
        options="rolecall.config.play:PlayOptions",
        run="rolecall.cli.play:run",
    ),
    Command(
        name="report",
        about="a page to look at a run: curves, and answers token by token",
        options="rolecall.config.report:ReportOptions",
        run="rolecall.cli.report:run",
    ),
    Command(
        name="push",
        about="a run's model on the Hugging Face hub, with a card made from the run",
        options="rolecall.config.push:PushOptions",
        run="rolecall.cli.push:run",
    ),
    Command(
        name="env",
        about="versions and hardware, to paste into a bug report",
        options="rolecall.config.env:EnvOptions",
        run="rolecall.cli.env:run",
    ),
)


def imported(name: str) -> Any:
    """What "module:name" stands for."""
    module, _, attribute = name.partition(":")
    return getattr(import_heavy(module), attribute)
