"""Episodes on their own clocks against episodes in lockstep, with environments that take their time.

    python benchmarks/clocks.py --ways instant,clocks,before
    python benchmarks/clocks.py --ways instant,clocks,lockstep,default
    python benchmarks/clocks.py --layers 4 --turns 3 --episodes 16

64 episodes of 8 turns; an environment's answer takes 0 to 1 s, uniform, drawn from (episode, turn). The ways are taken one after the
other, because a machine that is shared changes its speed from minute to minute:

    instant     on their own clocks, environments that answer at once
    clocks      on their own clocks, a process for each environment
    lockstep    all wait for the slowest at every turn, a process for each environment
    default     the same with two processes for the environments
    before      the code of the commit before episodes had clocks of their own, as it was: lockstep, two processes by default

The model has random weights, so turns have the length they are given. What was measured is added to a file; the table that is printed
has all of it that has the same sizes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rolecall.agents.conversation import Dialect
from rolecall.agents.play import Player
from rolecall.agents.pool import EnvPool, Failure
from rolecall.agents.replies import Reply
from rolecall.config.agents import AgentOptions
from rolecall.policy.tiny import TURN_END_ID, tiny_tokenizer
from rolecall.rollout.native import NativeEngine
from rolecall.tasks.env import Step
from rolecall.types import Sampling

try:
    from rolecall.agents.played import Wanted
except ImportError:  # in the code of before
    from rolecall.agents.play import Wanted  # type: ignore[attr-defined,no-redef]

CONTEXT = 4096
BEFORE = "0b20c4a^"
"""The commit before episodes had clocks of their own."""
WAYS = {
    "instant": "own clocks, environments that answer at once",
    "clocks": "own clocks, a process for each environment",
    "lockstep": "lockstep, a process for each environment",
    "default": "lockstep, two processes",
    "before": "the code of before as it was: lockstep, two processes",
}


class Slow:
    """Answers after a while."""

    def reset(self, row, seed):
        self.row, self.turn = row, 0
        return "go"

    def step(self, message):
        self.turn += 1
        if self.row["slow"]:
            time.sleep(Random(f"{self.row['episode']}/{self.turn}").random())
        return Step(messages="on", reward=1.0, done=self.turn == self.row["turns"])


class Together(EnvPool):
    """Hands answers on when all have come."""

    def receive(self, *, wait: bool) -> list[tuple[int, Reply | Failure]]:
        """Nothing while the engine decodes, then all that was asked for."""
        if not wait:
            return []
        found = []
        while self._busy or any(self._queues):
            found += super().receive(wait=True)
        return sorted(found, key=lambda pair: pair[0])


def engine(layers: int) -> NativeEngine:
    """Of a model with random weights, 512 wide."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
    )
    model = LlamaForCausalLM(config)
    return NativeEngine(model, tokenizer, stop_ids=(TURN_END_ID,), context_length=CONTEXT)


def played(way: str, options: argparse.Namespace) -> tuple[float, list[Any]]:
    """(seconds, all ids) of a round, after a short one that loads and compiles everything."""
    native, tokenizer = engine(options.layers), tiny_tokenizer()
    kind = Together if way in ("lockstep", "default") else EnvPool
    with kind(Slow, workers=2 if way in ("default", "before") else options.episodes) as envs:
        player = Player(
            engine=native,
            envs=envs,
            dialect=Dialect(tokenizer=tokenizer, stop_ids=(TURN_END_ID,)),
            options=AgentOptions(max_turns=options.turns),
            context_length=CONTEXT,
        )

        def play(turns: int, tokens: int, *, slow: bool) -> list[Any]:
            rows = [{"episode": i, "slow": slow, "turns": turns} for i in range(options.episodes)]
            wanted = [Wanted(prompt=i, sample=0, row=row, seed=i) for i, row in enumerate(rows)]
            return player.play(wanted, Sampling(max_new_tokens=tokens, stop_ids=()), seed=0, step=0)

        play(2, 2, slow=False)
        begun = time.perf_counter()
        episodes = play(options.turns, options.tokens, slow=way != "instant")
        seconds = time.perf_counter() - begun
    return seconds, [[list(sample.ids) for sample in episode.sides["agent"].samples] for episode in episodes]


def played_before(options: argparse.Namespace) -> float:
    """The same by the code of that commit, in a process of its own."""
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as place:
        packed = subprocess.run(["git", "archive", BEFORE, "src"], cwd=root, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "-C", place], input=packed, check=True)
        sizes = [word for name in SIZES for word in (f"--{name}", str(getattr(options, name)))]
        done = subprocess.run(
            [sys.executable, __file__, "--alone", "before", *sizes],
            env={**os.environ, "PYTHONPATH": f"{place}/src"},
            check=True,
            capture_output=True,
            text=True,
        )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["source"].startswith(place), "the code of before was not what ran"
    return float(found["seconds"])


SIZES = {"layers": 12, "episodes": 64, "turns": 8, "tokens": 48}


def table(rounds: list[dict[str, Any]]) -> str:
    """The page's, from all rounds."""
    middle = {way: statistics.median(s) for way in WAYS if (s := [r["seconds"] for r in rounds if r["way"] == way])}
    lines = ["| | seconds, median | rounds | times as long as on their own clocks |", "|---|---|---|---|"]
    for way, seconds in middle.items():
        count = sum(r["way"] == way for r in rounds)
        lines.append(f"| {WAYS[way]} | {seconds:.1f} | {count} | {seconds / middle['clocks']:.2f} |")
    lines += [
        "",
        f"Of the throughput of environments that answer at once {middle['instant'] / middle['clocks']:.0%} is reached.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, add to the file, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--measured", type=Path, default=Path("runs/clocks.jsonl"))
    options = parser.parse_args()
    if options.alone:
        import rolecall

        print(json.dumps({"seconds": played(options.alone, options)[0], "source": rolecall.__file__}))
        return
    sizes, answers = {name: getattr(options, name) for name in SIZES}, {}
    options.measured.parent.mkdir(parents=True, exist_ok=True)
    for way in options.ways.split(","):
        if way == "before":
            seconds = played_before(options)
        else:
            seconds, answers[way] = played(way, options)
        print(f"{way:9} {seconds:7.1f} s", flush=True)
        with options.measured.open("a") as file:
            file.write(json.dumps({"way": way, "seconds": seconds, **sizes}) + "\n")
    print(f"the same tokens in all: {all(found == next(iter(answers.values())) for found in answers.values())}")
    rounds = [json.loads(line) for line in options.measured.read_text().splitlines()]
    rounds = [r for r in rounds if all(r[name] == size for name, size in sizes.items())]
    if {"instant", "clocks"} <= {r["way"] for r in rounds}:
        print(table(rounds))


if __name__ == "__main__":
    main()
