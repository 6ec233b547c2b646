"""Rows of TextWorld's coin collector: games to train on, games that are held out, demonstrations to begin with.

    python benchmarks/textworld_games.py OUT [--seed 0]

writes demonstrations.jsonl and games.jsonl for `rolecall sft` and `rolecall rl`. Three demonstrations in four walk to and fro between
the first two rooms; one is the game's walkthrough. What is to be learnt is to go on.
"""

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

from rolecall.agents.textworld_env import TextWorldEnv

LEVEL, TURNS, GAMES, HELD_OUT, DEMONSTRATIONS = 4, 6, 64, 64, 600
"""Rooms in a row, the coin in the last; commands that an episode has; games of each kind; demonstrations of all games."""
ENV = f"textworld:coin={LEVEL},brief=true"


BACK = {"go north": "go south", "go south": "go north", "go east": "go west", "go west": "go east"}


def played(game: int, commands: list[str]) -> dict[str, Any]:
    """These commands as a demonstration."""
    env = TextWorldEnv(coin=LEVEL, brief=True)
    prompt, messages = [{"role": "user", "content": env.reset({"seed": game}, 0)}], list[dict[str, str]]()
    for turn, command in enumerate(commands):
        messages.append({"role": "assistant", "content": command})
        step = env.step(messages[-1])
        if turn < len(commands) - 1:
            messages.append({"role": "user", "content": str(step.messages)})
    return {"prompt": prompt, "completion": messages}


def walkthrough(game: int) -> list[str]:
    """The commands that win it."""
    import textworld

    found = textworld.Game.load(str(TextWorldEnv(coin=LEVEL, brief=True)._made(game).with_suffix(".json")))
    return list(found.walkthrough)


def demonstrations(seed: int) -> list[dict[str, Any]]:
    """Of the games to train on, as long as their walkthroughs."""
    rng, ways = Random(seed), [walkthrough(game) for game in range(GAMES)]
    there = [[way[0], BACK[way[0]]] * (len(way) // 2) for way in ways]
    both = [[played(game, way) for game, way in enumerate(kind)] for kind in (ways, there)]
    return [both[rng.random() >= 0.25][rng.randrange(GAMES)] for _ in range(DEMONSTRATIONS)]


def games(*, held_out: bool = False) -> list[dict[str, int]]:
    """Rows, each a game: those to train on, or others."""
    return [{"seed": -1 - i} for i in range(HELD_OUT)] if held_out else [{"seed": i} for i in range(GAMES)]


def write(rows: list[dict[str, Any]], path: Path) -> str:
    """A file of rows; its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def main() -> None:
    """Write the files, and say how alike the games are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write(demonstrations(given.seed), given.out / "demonstrations.jsonl")
    write(games(), given.out / "games.jsonl")
    known = {tuple(walkthrough(game)) for game in range(GAMES)}
    same = sum(tuple(walkthrough(row["seed"])) in known for row in games(held_out=True))
    print(
        f"{same} of {HELD_OUT} held-out games are won by the commands of a game to train on, {len(known)} ways in all"
    )


if __name__ == "__main__":
    main()
