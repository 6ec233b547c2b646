"""Players of a game who do not learn: their words come from a model behind an address, or from another model here.

They belong to the environment. Whoever plays sees the other players only, reads a frozen one's words as it reads any observation,
and nothing that a frozen player says or reads is recorded as its own: there is nothing that could train.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rolecall.agents.conversation import Dialect
from rolecall.agents.pool import Envs, Failure, Tools
from rolecall.agents.replies import Reply
from rolecall.agents.worker import Call
from rolecall.errors import UserError
from rolecall.remote.plain import PlainServer, TextAnswer
from rolecall.rollout.engine import Engine
from rolecall.rollout.stops import Ticket
from rolecall.tasks.env import Message
from rolecall.types import Request, Sampling

_WAIT_S = 0.05


class Voice(Protocol):
    """Where a frozen player's words come from."""

    def begin(self, key: int, messages: Sequence[Message], *, seed: int) -> None:
        """Ask for what comes after the messages; `key` is whose it is."""
        ...

    def ended(self, *, wait: float) -> list[tuple[int, str | Failure]]:
        """What has come since the last time; waits for something for at most so many seconds."""
        ...

    def forget(self) -> None:
        """Give up what was asked for."""
        ...

    def __len__(self) -> int:
        """What was asked for and has not come."""
        ...


class ServerVoice(Voice):
    """A model behind OpenAI's API."""

    def __init__(self, server: PlainServer, sampling: Sampling, *, seconds: float) -> None:
        self.server, self.sampling, self.seconds = server, sampling, seconds
        self._asked: dict[Future[TextAnswer], int] = {}

    def begin(self, key: int, messages: Sequence[Message], *, seed: int) -> None:
        said = [{"role": message["role"], "content": message["content"]} for message in messages]
        self._asked[self.server.begin(said, self.sampling, seed=seed >> 17, seconds=self.seconds)] = key

    def ended(self, *, wait: float) -> list[tuple[int, str | Failure]]:
        done = wait_for(self._asked, timeout=wait, return_when=FIRST_COMPLETED).done
        return [(self._asked.pop(future), _heard(future)) for future in sorted(done, key=self._asked.__getitem__)]

    def forget(self) -> None:
        for future in self._asked:
            future.cancel()
        self._asked = {}

    def __len__(self) -> int:
        return len(self._asked)


def _heard(future: "Future[TextAnswer]") -> str | Failure:
    try:
        return future.result().text
    except UserError as error:
        return Failure(reason=f"a frozen player is silent: {error}")


class ModelVoice(Voice):
    """A model of its own in this process, whose weights stay as they are."""

    def __init__(self, engine: Engine, dialect: Dialect, sampling: Sampling, *, context_length: int) -> None:
        self.engine, self.dialect, self.sampling, self.limit = engine, dialect, sampling, context_length
        self._silent: list[tuple[int, str | Failure]] = []
        self.forget()

    def begin(self, key: int, messages: Sequence[Message], *, seed: int) -> None:
        system = self.dialect.system_prompt
        told = [] if system is None or messages[0]["role"] == "system" else [{"role": "system", "content": system}]
        ids = self.dialect.prompt([*told, *messages], given=len(messages)).ids
        if len(ids) + self.sampling.max_new_tokens > self.limit:
            self._silent.append((key, Failure(reason="a frozen player has no room left in its context")))
        else:
            request = Request(prompt_ids=tuple(ids), sampling=self.sampling, seed=seed)
            self._asked[self._flight.add(request)] = key

    def ended(self, *, wait: float) -> list[tuple[int, str | Failure]]:
        found, self._silent = self._silent, []
        for ticket, completion in self._flight.step() if self._asked else ():
            found.append((self._asked.pop(ticket), self.dialect.text(completion)))
        return found

    def forget(self) -> None:
        self._flight, self._asked = self.engine.open(), dict[Ticket, int]()

    def __len__(self) -> int:
        return len(self._asked) + len(self._silent)


@dataclass(slots=True)
class _Game:
    """What is going on in an episode beside what the others see."""

    seed: int
    heard: dict[str, list[Message]] = field(default_factory=dict)
    """By frozen player: its conversation, its own words among it."""
    unread: Reply = field(default_factory=Reply)
    """What has happened since one of the others spoke."""
    turns: int = 0
    speaker: str = ""
    call: Call = "start"
    """What the others had done last."""


class FrozenEnvs(Envs):
    """Environments in which some players are frozen, as environments of the others."""

    def __init__(self, envs: Envs, voices: Mapping[str, Voice], *, max_turns: int) -> None:
        """A frozen player has at most `max_turns` turns in an episode; then it is cut off."""
        self.envs, self.voices, self.max_turns = envs, voices, max_turns
        self._games: dict[int, _Game] = {}
        self._due = 0

    @property
    def players(self) -> tuple[str, ...]:
        return tuple(player for player in self.envs.players if player not in self.voices)

    @property
    def tools(self) -> Tools:
        return self.envs.tools

    def begin(self) -> None:
        for voice in self.voices.values():
            voice.forget()
        self._games, self._due = {}, 0
        self.envs.begin()

    def send(self, key: int, call: Call, given: Any) -> None:
        if call == "start":
            self._games[key] = _Game(seed=given[1])
        self._games[key].call = call
        self._send(key, call, given)

    def _send(self, key: int, call: Call, given: Any) -> None:
        self._due += 1
        self.envs.send(key, call, given)

    def receive(self, *, wait: bool) -> list[tuple[int, Reply | Failure]]:
        found: list[tuple[int, Reply | Failure]] = []
        while True:
            speaking = [voice for voice in self.voices.values() if len(voice)]
            for key, reply in self.envs.receive(wait=wait and bool(self._due) and not speaking):
                self._due -= 1
                if (passed := self._pass(key, reply)) is not None:
                    found.append((key, passed))
            for voice in speaking:
                for key, said in voice.ended(wait=_WAIT_S if wait and not found else 0.0):
                    if isinstance(said, Failure):
                        found.append((key, said))
                    else:
                        self._say(key, said)
            if found or not wait or not (self._due or any(map(len, self.voices.values()))):
                return found

    def _say(self, key: int, text: str) -> None:
        game, message = self._games[key], {"role": "assistant", "content": text}
        game.heard[game.speaker].append(message)
        self._send(key, "step", message)

    def _pass(self, key: int, reply: Reply | Failure) -> Reply | Failure | None:
        """What the others are told of it; None if a frozen player speaks first."""
        if isinstance(reply, Failure):
            return reply
        game, frozen = self._games[key], self.voices
        for player, messages in reply.messages.items():
            if player in frozen:
                game.heard.setdefault(player, []).extend(messages)
        if reply.speaker in frozen and reply.context is not None:
            game.heard[reply.speaker], reply = list(reply.context), replace(reply, context=None)
        told = _together(game.unread, reply, without=frozen)
        game.unread = Reply()
        if told.done or game.call == "end" or told.speaker not in frozen:
            return told
        if game.turns >= self.max_turns:
            return replace(told, done=True, truncated=True)
        if game.call == "start" and not game.turns:
            told = replace(told, opening=told.messages, messages={})
        game.unread, game.speaker, game.turns = told, told.speaker, game.turns + 1
        text = f"{game.seed}/{game.speaker}/{game.turns}"
        frozen[game.speaker].begin(key, game.heard.get(game.speaker, []), seed=_number(text))
        return None


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def _together(first: Reply, then: Reply, *, without: Mapping[str, Any]) -> Reply:
    """Two replies as one, as far as the players who are not frozen are concerned."""

    def both(one: Mapping[str, Any], other: Mapping[str, Any], add: Callable[[Any, Any], Any]) -> dict[str, Any]:
        found = {name: value for name, value in one.items() if name not in without}
        for name, value in other.items():
            if name not in without:
                found[name] = add(found[name], value) if name in found else value
        return found

    return replace(
        then,
        opening=first.opening,
        messages=both(first.messages, then.messages, lambda a, b: [*a, *b]),
        rewards=both(first.rewards, then.rewards, lambda a, b: a + b),
        counts=both(first.counts, then.counts, lambda a, b: a + b),
    )
