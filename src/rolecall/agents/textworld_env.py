"""Games that TextWorld makes, without a network: `textworld:rooms=2,objects=4,quest=2`.

A row's `seed` is the game: its map, its objects and its quest. A row with a `game`, the path of a file that TextWorld made,
plays that. Games are compiled once and kept in the directory for temporary files.
"""

import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from rolecall.tasks.env import EnvError, Message, Step

_PROMPT = re.compile(r"\s*>\s*(-= [^\n]*)?$")
"""Where the game waits for a command, and its status line."""


class TextWorldEnv:
    """The policy's first line is a command; the game answers. The reward is what a command adds to the score, of 1 in all."""

    def __init__(self, *, rooms: int = 2, objects: int = 4, quest: int = 2, hints: bool = False) -> None:
        """So many rooms and objects, a quest of so many commands; `hints` lists what can be done."""
        self._size = {"nb_rooms": rooms, "nb_objects": objects, "quest_length": quest}
        self._hints = hints
        self._textworld = _package()

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        textworld, given = self._textworld, row.get("game")
        path = Path(given) if given is not None else self._made(int(row.get("seed", seed)))
        if not path.is_file():
            raise EnvError(f"there is no game {path}")
        known = ("admissible_commands", "objective", "description", "won", "lost", "max_score")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the interpreter knows no game of TextWorld, which keeps the score itself
            self._game = textworld.start(str(path), textworld.EnvInfos(**dict.fromkeys(known, True)))
            state = self._game.reset()
        self.score, self.most, self.won = 0.0, float(state.max_score or 1), False
        return "\n\n".join([state.objective.strip(), state.description.strip(), *self._can_be_done(state)])

    def step(self, message: Message) -> Step:
        command = next(iter(message["content"].strip().splitlines()), "").strip()
        if not command:
            return Step(messages="Say what to do.", counts={"no_commands": 1.0})
        state, score, done = self._game.step(command)
        self.won, gained, self.score = bool(state.won), (score - self.score) / self.most, float(score)
        said = _PROMPT.sub("", state.feedback.strip("\n")).strip() or "Nothing happens."
        if done:
            return Step(messages=said, reward=gained, done=True, counts={"won": float(self.won)})
        return Step(messages="\n\n".join([said, *self._can_be_done(state)]), reward=gained)

    def _can_be_done(self, state: Any) -> list[str]:
        return [f"You can: {', '.join(state.admissible_commands)}."] if self._hints else []

    def _made(self, seed: int) -> Path:
        """The game of a seed, made and compiled unless it has been."""
        textworld = self._textworld
        name = sha256(f"{textworld.__version__}/{sorted(self._size.items())}/{seed}".encode()).hexdigest()[:16]
        place = Path(tempfile.gettempdir()) / f"rolecall-textworld-{os.getuid()}"
        place.mkdir(mode=0o700, exist_ok=True)
        if place.stat().st_uid != os.getuid():
            raise EnvError(f"{place}, where games are kept, belongs to somebody else: set TMPDIR")
        if not (made := place / f"{name}.z8").is_file():
            options = textworld.GameOptions()
            options.seeds = Random(seed).randrange(2**31)
            for option, value in self._size.items():
                setattr(options, option, value)
            with tempfile.TemporaryDirectory(dir=place) as aside:
                options.path = str(Path(aside) / f"{name}.z8")
                textworld.generator.compile_game(textworld.generator.make_game(options), options)
                for ending in (".json", ".z8"):  # the game itself last: who finds it finds all
                    (Path(aside) / f"{name}{ending}").replace(made.with_suffix(ending))
        return made


def textworld_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a name, if they are all known and make sense."""
    known: dict[str, type] = {"rooms": int, "objects": int, "quest": int, "hints": bool}
    for option, value in given.items():
        if option not in known:
            raise EnvError(f"environment {name!r}: there is no option {option!r}, but {', '.join(known)}")
        if type(value) is not known[option] or (type(value) is int and value < 1):
            wanted = "true or false" if known[option] is bool else "a whole number of at least 1"
            raise EnvError(f"environment {name!r}: {option} must be {wanted}, got {value!r}")
    return dict(given)


def _package() -> Any:
    try:
        import textworld
        import textworld.generator
    except ImportError as error:
        raise EnvError(
            "environments named textworld:… need the package textworld: pip install 'rolecall[textworld]'"
        ) from error
    return textworld
