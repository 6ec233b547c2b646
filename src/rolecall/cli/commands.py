"""The table of commands. What a row names is imported when it is needed, so that `--help` never waits for torch."""

from dataclasses import dataclass
from typing import Any

from rolecall.heavy import import_heavy


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One word after `rolecall`. Functions and classes are given as "module:name"."""

    name: str
    """The word."""
    about: str
    """What it does, in half a line."""
    options: str
    """Its dataclass of options. An attribute `presets` of it holds nested settings by name, and its method `plan` returns
    what --dry-run says below the settings."""
    run: str
    """Takes the options and does the work. An int that it returns is the exit code; anything else is 0."""
    light: bool = False
    """True if it loads no model."""
    trains: bool = False
    """True if it makes a run: it shows progress, and `cli.train` says what came out."""


def _trains(name: str, about: str, options: str) -> Command:
    run = "rolecall.jobs.running:run"
    return Command(name=name, about=about, options=f"rolecall.config.{options}", run=run, trains=True)


def _uses(name: str, about: str, options: str, run: str, *, light: bool = False) -> Command:
    return Command(name=name, about=about, options=f"rolecall.config.{options}", run=f"rolecall.cli.{run}", light=light)


COMMANDS = (
    _uses(
        "demo",
        "SFT, a reward model, PPO and GRPO on the built-in model, in minutes",
        "use:DemoOptions",
        "demo:run",
    ),
    _trains("sft", "supervised fine-tuning on demonstrations", "training:SFTOptions"),
    _trains("rm", "a reward model from preferences", "training:RMOptions"),
    _trains("rl", "reinforcement learning from a reward", "rl:RLOptions"),
    _trains("dpo", "a policy from preferences, without a reward model", "training:DPOOptions"),
    _trains("best-of-n", "the best of n answers to every prompt, and what n buys", "training:BestOfNOptions"),
    _trains("expert-iteration", "rounds of sampling and imitating the good answers", "training:ExpertIterationOptions"),
    _trains("marl", "agents that learn together: IQL, VDN, QMIX, IPPO, MAPPO", "marl:MARLOptions"),
    _uses("audit", "look before training: model, template, rows and reward", "audit:AuditOptions", "tokens:audit"),
    _uses("rescore", "another reward for the answers a run has stored", "use:RescoreOptions", "printing:rescore"),
    _uses("eval", "how good a model is on held-out rows", "use:EvalOptions", "printing:evaluate"),
    _uses("generate", "answers from a model, whole or token by token", "use:GenerateOptions", "tokens:generate"),
    _uses("serve", "a model behind HTTP, tokens in and out", "use:ServeOptions", "printing:serve"),
    _uses("play", "episodes of several turns, as a conversation or token by token", "use:PlayOptions", "tokens:play"),
    _uses("propose", "rows that a model makes for an environment", "use:ProposeOptions", "printing:propose"),
    _uses(
        "report",
        "a page to look at a run: curves, and answers token by token",
        "use:ReportOptions",
        "printing:report",
        light=True,
    ),
    _uses("view", "a local page over all runs, live while they train", "view:ViewOptions", "viewing:view", light=True),
    _uses(
        "doctor",
        "what looks wrong with a run, which answers show it, what to try first",
        "use:DoctorOptions",
        "printing:doctor",
        light=True,
    ),
    _uses("plan", "what a run would take on GPUs, before you pay", "planning:PlanOptions", "plan:run", light=True),
    _uses(
        "diff",
        "where runs part, and whether seeds differ by more than noise",
        "use:DiffOptions",
        "comparing:diff",
        light=True,
    ),
    _uses(
        "push",
        "a run's model on the Hugging Face hub, with a card made from the run",
        "use:PushOptions",
        "printing:push",
        light=True,
    ),
    _uses(
        "conformance",
        "which cases of masks, returns, KL and losses a library passes",
        "use:ConformanceOptions",
        "printing:conformance",
    ),
    _uses("env", "versions and hardware, to paste into a bug report", "use:EnvOptions", "printing:env", light=True),
)


def imported(name: str) -> Any:
    """What "module:name" stands for."""
    module, _, attribute = name.partition(":")
    return getattr(import_heavy(module), attribute)
