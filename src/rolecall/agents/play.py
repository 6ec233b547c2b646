"""Plays episodes, each on its own clock: it asks for its next turn when its environment has answered.

A turn joins those that the engine is decoding; environments take their steps meanwhile. Every random number of a turn is a
function of (seed, step, prompt, sample, position), where the sample's number is the episode's, counted on for other players
and for samples after a cut. So an episode does not depend on the others' timing, wherever the engine's arithmetic does not
depend on what else is in the batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from time import monotonic
from typing import Any

from rolecall.agents.adapters import named_in
from rolecall.agents.context import QUESTION, THOUGHT, context_of
from rolecall.agents.conversation import Conversation, Dialect
from rolecall.agents.played import Played, PlayedTurn, Wanted
from rolecall.agents.pool import Envs, Failure
from rolecall.agents.replies import Reply
from rolecall.config.agents import AgentOptions
from rolecall.policy.chat_template import template_kwargs, tools_of
from rolecall.rollout.engine import Engine
from rolecall.rollout.stops import Ticket
from rolecall.types import Completion, Finish, Request, Sampling

LESSONS = "Lessons from earlier attempts:"
"""What lessons begin with in a prompt."""


@dataclass(slots=True)
class _Episode(Played):
    """One that an environment answers."""

    sides: dict[str, Conversation]
    context: str = "append"
    """What becomes of conversations as they grow."""
    summarising: bool = False
    """The turn that was asked for is a summary."""


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


def _with_tools(dialect: Dialect, tools: Sequence[Mapping[str, Any]]) -> Dialect:
    """With an environment's tools, unless the run says which the template is given."""
    return replace(dialect, template_kwargs={**({"tools": list(tools)} if tools else {}), **dialect.template_kwargs})


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
        self.dialect = _with_tools(dialect, () if isinstance(envs.tools, Mapping) else envs.tools)
        self.limit = min(context_length, options.context_tokens or context_length)
        self.advance: Callable[[int, int, str], None] = lambda done, total, unit: None
        """Told how many episodes have ended."""
        self.ended: Callable[[Played], None] = lambda episode: None
        """Told of each episode as it ends."""
        self.between: Callable[[], None] = lambda: None
        """Called over and over while episodes are played."""

    @property
    def players(self) -> tuple[str, ...]:
        return self.envs.players

    def play(self, wanted: Sequence[Wanted], sampling: Sampling, *, seed: int, step: int) -> list[Played]:
        """All of them to their ends, in the order given."""
        o = self.options
        until = inf if o.max_seconds is None else self.clock() + o.max_seconds
        drawn = drawn_for(wanted, sampling, seed=seed, step=step)
        dialects = {w.prompt: dialect_of(w.row, self._dialect(w.row)) for w in wanted}
        episodes = [
            _Episode(
                wanted=w,
                sides={player: Conversation(dialects[w.prompt]) for player in self.envs.players},
                speaker=self.envs.players[0],
                version=self.engine.version,
                context=context_of(w.row, o),
            )
            for w in wanted
        ]
        flight, turns, ended = self.engine.open(), dict[Ticket, int](), 0

        def go_on(i: int) -> int:
            """Ask for the next turn; 1 if the episode has ended instead."""
            episode = episodes[i]
            if request := self._request(episode, drawn):
                turns[flight.add(request)] = i
            elif episode.finish is not None and episode.finish.truncated:
                self.envs.send(i, "end", None)
            else:
                self.ended(episode)
                return 1
            return 0

        self.envs.begin()
        for i, w in enumerate(wanted):
            self.envs.send(i, "start", (w.row, w.seed))
        while ended < len(episodes):
            before = ended
            for i, reply in self.envs.receive(wait=not flight):
                episode = episodes[i]
                if episode.finish is not None:  # it was cut off, and this is the environment's last word
                    self._take(episode, reply)
                    self.ended(episode)
                    ended += 1
                    continue
                self._heard(episode, reply)
                if episode.finish is None and self.clock() >= until:
                    episode.finish = Finish.TIMEOUT
                ended += go_on(i)
            self.between()
            for ticket, completion in flight.step():
                i = turns.pop(ticket)
                if episodes[i].summarising:
                    self._summarised(episodes[i], completion)
                    ended += go_on(i)
                else:
                    self.envs.send(i, "step", self._said(episodes[i], completion))
            if ended > before:
                self.advance(ended, len(episodes), "episodes")
        return list(episodes)

    def _dialect(self, row: Mapping[str, Any]) -> Dialect:
        """With the tools of the environment that a row plays."""
        by_name = self.envs.tools
        return _with_tools(self.dialect, named_in(row, by_name)) if isinstance(by_name, Mapping) else self.dialect

    def _request(self, episode: _Episode, drawn: Drawn) -> Request | None:
        """What to ask for next, or None if the episode is over, or has no room left, which ends it."""
        if episode.finish is not None:
            return None
        side, o, sampling = episode.sides[episode.speaker], self.options, drawn.sampling
        self._guide(episode, room=sampling.max_new_tokens)
        room = sampling.max_new_tokens
        if o.max_tokens is not None:
            room = min(room, o.max_tokens - side.policy_tokens)
        ids = self._read(episode, room)
        side = episode.sides[episode.speaker]
        room = min(room, self.limit - len(ids))
        if room < 1:
            episode.finish = Finish.LENGTH
            return None
        wanted, players = episode.wanted, self.envs.players
        number = side.cuts * len(players) + players.index(episode.speaker)
        if room != sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=room)
        return drawn.request(wanted, number, ids, sampling, who=episode.speaker)

    def _read(self, episode: _Episode, room: int) -> tuple[int, ...]:
        """What the speaker reads before its next turn, in a context that has room for it, or before a summary."""
        side, how = episode.sides[episode.speaker], episode.context
        if how == "thoughts" and side.drop(THOUGHT):
            episode.count("context_cuts")
        before = side.copy() if how == "summary" and side.spoke else None
        ids = side.prompt()
        full = len(ids) + room > self.limit
        if how in ("window", "memory") and full and side.shorten(limit=self.limit, room=room, notes=how == "memory"):
            ids = side.prompt()
            episode.count("context_cuts")
        elif before is not None and len(ids) + 2 * room + self._question > self.limit:
            # After this turn the question might have no room: it is asked now, before what was just heard.
            episode.sides[episode.speaker], episode.summarising = before, True
            ids = before.ask(QUESTION)
        return ids

    @cached_property
    def _question(self) -> int:
        """Tokens that asking for a summary takes."""
        return len(self.dialect.prompt([QUESTION], given=1).ids)

    def _summarised(self, episode: _Episode, completion: Completion) -> None:
        side = episode.sides[episode.speaker]
        episode.turns.setdefault(episode.speaker, []).append(PlayedTurn(state=side.state, summary=True))
        side.go_on_from(completion)
        episode.summarising = False
        episode.count("summaries")
        episode.count("context_cuts")

    def _guide(self, episode: _Episode, *, room: int) -> None:
        """Before a player's first turn: let it read lessons, if they and an answer have room in the context."""
        recall, side = episode.wanted.recall, episode.sides[episode.speaker]
        if recall is None or episode.speaker in episode.lessons:
            return
        found = recall("\n".join(message["content"] for message in side.messages))
        if found:
            text = "\n".join([LESSONS, *(f"- {lesson.text}" for lesson in found)])
            side.remember([{"role": "user", "content": text, "author": "memory"}])
            if len(side.prompt()) + room > self.limit:
                side.remember([])
                found = ()
                episode.count("lessons_too_long")
        episode.lessons[episode.speaker] = tuple(lesson.id for lesson in found)

    def _said(self, episode: _Episode, completion: Completion) -> Any:
        episode.count("turns")
        if completion.finish is Finish.LENGTH:
            episode.count("cut_turns")
        side = episode.sides[episode.speaker]
        episode.turns.setdefault(episode.speaker, []).append(PlayedTurn(state=side.state))
        return side.say(completion)

    def _heard(self, episode: _Episode, answer: Reply | Failure) -> None:
        """Take in what the environment said, and end the episode if it or a limit does."""
        reply = self._take(episode, answer)
        if reply is None:
            return
        if reply.context is not None:
            episode.sides[reply.speaker].restart(reply.context)
            episode.count("context_cuts")
        for player, messages in (*reply.opening.items(), *reply.messages.items()):
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
            if player in episode.turns:
                episode.turns[player][-1].reward += reward
        for name, value in reply.counts.items():
            episode.count(name, value)
        episode.view = reply.view
        return reply
