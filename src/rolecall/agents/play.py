"""Plays episodes, each on its own clock: it asks for its next turn when its environment has answered.

A turn joins those that the engine is decoding; environments take their steps meanwhile. Every random number of a turn is a
function of (seed, step, prompt, sample, position), where the sample's number is the episode's, counted on for other players
and for samples after a cut. So an episode does not depend on the others' timing, wherever the engine's arithmetic does not
depend on what else is in the batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic
from typing import Any, Protocol

from rolecall.agents.conversation import Conversation, Dialect, TokenSample
from rolecall.agents.pool import Envs, Failure
from rolecall.agents.replies import Reply
from rolecall.config.agents import AgentOptions
from rolecall.policy.row_template import template_kwargs, tools_of
from rolecall.rollout.engine import Engine
from rolecall.rollout.stops import Ticket
from rolecall.tasks.env import Message
from rolecall.types import Completion, Finish, Request, Sampling, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """An episode to play."""

    prompt: int
    """Which prompt of the step it is."""
    sample: int
    """Which of the prompt's episodes."""
    row: Mapping[str, Any]
    """What its environment begins with."""
    seed: int
    """The seed of its environment; episodes of one prompt share it."""


class Spoken(Protocol):
    """What a player has read and said."""

    @property
    def samples(self) -> list[TokenSample]:
        """What the policy read and wrote, in order."""
        ...

    @property
    def messages(self) -> list[Message]:
        """The whole of it."""
        ...

    @property
    def policy_tokens(self) -> int:
        """How many tokens the policy has written."""
        ...


@dataclass(slots=True)
class Played:
    """An episode, while it is played and afterwards."""

    wanted: Wanted
    sides: Mapping[str, Spoken]
    """Each player's conversation."""
    speaker: str
    """Whose turn it is."""
    rewards: dict[str, float] = field(default_factory=dict)
    """What each player was given in all; none where the environment said nothing."""
    counts: dict[str, float] = field(default_factory=dict)
    """What the environment counted, and `turns` and `cut_turns`, those that ran into max_new_tokens."""
    finish: Finish | None = None
    """Why it ended; None while it is played."""
    failure: str | None = None
    """What went wrong, if it was broken off."""
    view: Mapping[str, Any] = field(default_factory=dict)
    """What reward functions see of the environment."""
    version: int = 0
    """The weights that played."""

    def count(self, name: str, value: float = 1.0) -> None:
        """Add to a count."""
        self.counts[name] = self.counts.get(name, 0.0) + value

    def trajectories(self, *, group: int) -> dict[str, list[Trajectory]]:
        """Each player's samples, in order. All carry the episode's finish."""
        assert self.finish is not None
        return {
            player: [
                Trajectory(
                    ids=tuple(sample.ids),
                    roles=tuple(sample.roles),
                    behaviour_logprobs=tuple(sample.logprobs),
                    agent=player,
                    episode=self.wanted.sample,
                    group=group,
                    turns=tuple(sample.turns),
                    authors=tuple(sample.authors),
                    finish=self.finish,
                    policy_version=min((version for *_, version in sample.versions), default=self.version),
                    versions=tuple(sample.versions) if len({v for *_, v in sample.versions}) > 1 else None,
                    supports=tuple(sample.supports) if any(sample.supports) else None,
                )
                for sample in side.samples
            ]
            for player, side in self.sides.items()
        }


@dataclass(slots=True)
class _Episode(Played):
    """One that an environment answers."""

    sides: dict[str, Conversation]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """How the turns of all episodes are drawn."""

    sampling: Sampling
    seed: int
    step: int
    samples: int
    """Episodes of a prompt."""

    def request(self, wanted: Wanted, number: int, ids: tuple[int, ...], sampling: Sampling, *, who: str) -> Request:
        """For a turn of an episode; each of its samples has a number."""
        return Request(
            prompt_ids=ids,
            sampling=sampling,
            seed=self.seed,
            step=self.step,
            prompt=wanted.prompt,
            first_sample=number * self.samples + wanted.sample,
            conversation=f"{self.step}/{wanted.prompt}/{wanted.sample}/{who}",
        )


def drawn_for(wanted: Sequence[Wanted], sampling: Sampling, *, seed: int, step: int) -> Drawn:
    """How the turns of these episodes are drawn."""
    return Drawn(sampling=sampling, seed=seed, step=step, samples=1 + max((w.sample for w in wanted), default=0))


def dialect_of(row: Mapping[str, Any], dialect: Dialect) -> Dialect:
    """How a row's episodes are rendered: with the environment's tools, then its own."""
    base, tools = dialect.template_kwargs, tools_of(row)
    kwargs = template_kwargs(row, base)
    if tools:
        given = list(base.get("tools", ()))
        kwargs["tools"] = [*given, *(tool for tool in tools if tool not in given)]
    return replace(dialect, template_kwargs=kwargs)


class Player:
    """Plays episodes of one kind of environment with one engine."""

    def __init__(
        self,
        *,
        engine: Engine,
        envs: Envs,
        dialect: Dialect,
        options: AgentOptions,
        context_length: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.engine, self.envs, self.options, self.clock = engine, envs, options, clock
        tools = {} if not envs.tools else {"tools": list(envs.tools)}
        self.dialect = replace(dialect, template_kwargs={**tools, **dialect.template_kwargs})
        self.limit = min(context_length, options.context_tokens or context_length)
        self.advance: Callable[[int, int, str], None] = lambda done, total, unit: None
        """Told how many episodes have ended."""

    @property
    def players(self) -> tuple[str, ...]:
        """Who plays."""
        return self.envs.players

    def play(self, wanted: Sequence[Wanted], sampling: Sampling, *, seed: int, step: int) -> list[Played]:
        """All of them to their ends, in the order given."""
        o = self.options
        until = inf if o.max_seconds is None else self.clock() + o.max_seconds
        drawn = drawn_for(wanted, sampling, seed=seed, step=step)
        dialects = {w.prompt: dialect_of(w.row, self.dialect) for w in wanted}
        episodes = [
            _Episode(
                wanted=w,
                sides={player: Conversation(dialects[w.prompt]) for player in self.envs.players},
                speaker=self.envs.players[0],
                version=self.engine.version,
            )
            for w in wanted
        ]
        flight, turns, ended = self.engine.open(), dict[Ticket, int](), 0
        self.envs.begin()
        for i, w in enumerate(wanted):
            self.envs.send(i, "start", (w.row, w.seed))
        while ended < len(episodes):
            before = ended
            for i, reply in self.envs.receive(wait=not flight):
                episode = episodes[i]
                if episode.finish is not None:  # it was cut off, and this is the environment's last word
                    self._take(episode, reply)
                    ended += 1
                    continue
                self._heard(episode, reply)
                if episode.finish is None and self.clock() >= until:
                    episode.finish = Finish.TIMEOUT
                if request := self._request(episode, drawn):
                    turns[flight.add(request)] = i
                elif episode.finish is not None and episode.finish.truncated:
                    self.envs.send(i, "end", None)
                else:
                    ended += 1
            for ticket, completion in flight.step():
                i = turns.pop(ticket)
                self.envs.send(i, "step", self._said(episodes[i], completion))
            if ended > before:
                self.advance(ended, len(episodes), "episodes")
        return list(episodes)

    def _request(self, episode: _Episode, drawn: Drawn) -> Request | None:
        """What to ask for next, or None if the episode is over, or has no room left, which ends it."""
        if episode.finish is not None:
            return None
        side, o, sampling = episode.sides[episode.speaker], self.options, drawn.sampling
        ids = side.prompt()
        room = sampling.max_new_tokens
        if o.max_tokens is not None:
            room = min(room, o.max_tokens - side.policy_tokens)
        if o.when_full == "cut" and len(ids) + room > self.limit and side.shorten(limit=self.limit, room=room):
            ids = side.prompt()
            episode.count("context_cuts")
        room = min(room, self.limit - len(ids))
        if room < 1:
            episode.finish = Finish.LENGTH
            return None
        wanted, players = episode.wanted, self.envs.players
        number = side.cuts * len(players) + players.index(episode.speaker)
        if room != sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=room)
        return drawn.request(wanted, number, ids, sampling, who=episode.speaker)

    def _said(self, episode: _Episode, completion: Completion) -> Any:
        episode.count("turns")
        if completion.finish is Finish.LENGTH:
            episode.count("cut_turns")
        return episode.sides[episode.speaker].say(completion)

    def _heard(self, episode: _Episode, answer: Reply | Failure) -> None:
        """Take in what the environment said, and end the episode if it or a limit does."""
        reply = self._take(episode, answer)
        if reply is None:
            return
        if reply.context is not None:
            episode.sides[reply.speaker].restart(reply.context)
            episode.count("context_cuts")
        for player, messages in reply.messages.items():
            episode.sides[player].hear(messages)
        if reply.done:
            episode.finish = Finish.MAX_TURNS if reply.truncated else Finish.ENVIRONMENT
            return
        episode.speaker = reply.speaker
        o = self.options
        if episode.counts.get("turns", 0) >= o.max_turns:
            episode.finish = Finish.MAX_TURNS
        elif o.max_tokens is not None and episode.sides[reply.speaker].policy_tokens >= o.max_tokens:
            episode.finish = Finish.LENGTH

    def _take(self, episode: Played, reply: Reply | Failure) -> Reply | None:
        """Add up rewards and counts; None if it is a failure, which ends the episode."""
        if isinstance(reply, Failure):
            episode.finish, episode.failure = Finish.ABORT, reply.reason
            return None
        for player, reward in reply.rewards.items():
            episode.rewards[player] = episode.rewards.get(player, 0.0) + reward
        for name, value in reply.counts.items():
            episode.count(name, value)
        episode.view = reply.view
        return reply
