"""Episodes on their own clocks against episodes in lockstep, with environments that take their time.

    python benchmarks/clocks.py
    python benchmarks/clocks.py --layers 4 --turns 3 --episodes 16 --rounds 1

64 episodes of 8 turns; an environment's answer takes 0 to 1 s, uniform, drawn from (episode, turn). Four ways, one after
the other in every round, because a machine that is shared changes its speed from minute to minute:

    instant     on their own clocks, environments that answer at once
    clocks      on their own clocks, a process for each environment
    lockstep    all wait for the slowest at every turn, a process for each environment
    default     the same with two processes for the environments, the default

The model has random weights, so turns have the length they are given.
"""

import argparse
import statistics
import time
from random import Random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rolecall.agents.conversation import Dialect
from rolecall.agents.play import Player
from rolecall.agents.played import Wanted
from rolecall.agents.pool import EnvPool, Failure
from rolecall.agents.replies import Reply
from rolecall.config.agents import AgentOptions
from rolecall.policy.tiny import TURN_END_ID, tiny_tokenizer
from rolecall.rollout.native import NativeEngine
from rolecall.tasks.env import Step
from rolecall.types import Sampling

CONTEXT = 4096


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 12), ("episodes", 64), ("turns", 8), ("tokens", 48), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    native, tokenizer = engine(options.layers), tiny_tokenizer()
    sampling = Sampling(max_new_tokens=options.tokens, stop_ids=())
    took: dict[str, list[float]] = {"instant": [], "clocks": [], "lockstep": [], "default": []}
    answers = {}
    with (
        EnvPool(Slow, workers=options.episodes) as many,
        Together(Slow, workers=options.episodes) as together,
        Together(Slow, workers=2) as few,
    ):
        for _ in range(options.rounds):
            for way, times in took.items():
                player = Player(
                    engine=native,
                    envs={"lockstep": together, "default": few}.get(way, many),
                    dialect=Dialect(tokenizer=tokenizer, stop_ids=(TURN_END_ID,)),
                    options=AgentOptions(max_turns=options.turns),
                    context_length=CONTEXT,
                )
                rows = [
                    {"episode": i, "slow": way != "instant", "turns": options.turns} for i in range(options.episodes)
                ]
                wanted = [Wanted(prompt=i, sample=0, row=row, seed=i) for i, row in enumerate(rows)]
                begun = time.perf_counter()
                played = player.play(wanted, sampling, seed=0, step=0)
                times.append(time.perf_counter() - begun)
                answers[way] = [[s.ids for s in e.sides["agent"].samples] for e in played]
                print(f"{way:9} {times[-1]:7.1f} s", flush=True)
    middle = {way: statistics.median(times) for way, times in took.items()}
    print(f"throughput of instant environments reached: {middle['instant'] / middle['clocks']:.0%}")
    print(f"times as fast as lockstep, as many processes: {middle['lockstep'] / middle['clocks']:.2f}")
    print(f"times as fast as lockstep, two processes: {middle['default'] / middle['clocks']:.2f}")
    print(f"the same tokens in all: {all(found == answers['clocks'] for found in answers.values())}")


if __name__ == "__main__":
    main()
