"""`rolecall env`: print versions and hardware."""

from rolecall.config.env import EnvOptions
from rolecall.jobs.env import environment


def run(options: EnvOptions) -> None:
    """A `name: value` line for each fact."""
    facts = environment()
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name + ':':{width + 1}} {value}")
