"""What environments say, checked: whatever they return becomes a `Reply`, or ends its episode with a sentence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from rolecall.errors import out_of_range
from rolecall.tasks.env import SOLO, Message, Move, Step


class BadReply(Exception):
    """An environment's answer that is no answer: it ends this episode, not the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What came of a reset or a step, whoever's environment it is: checked, and plain enough for JSON."""

    speaker: str = SOLO
    """Who speaks next."""
    messages: Mapping[str, Sequence[Message]] = field(default_factory=dict)
    """What each player reads."""
    opening: Mapping[str, Sequence[Message]] = field(default_factory=dict)
    """What each player was told by the task before these, where others spoke first."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """By player; none where nothing was said of it."""
    done: bool = False
    truncated: bool = False
    context: Sequence[Message] | None = None
    """The speaker's conversation from here on."""
    counts: Mapping[str, float] = field(default_factory=dict)
    view: Mapping[str, Any] = field(default_factory=dict)
    """When it is done: what reward functions see of the environment, its plain attributes."""


def players_of(env: Any) -> tuple[str, ...]:
    """The players, one where the environment does not name any."""
    return tuple(str(player) for player in getattr(env, "players", (SOLO,)))


def first_reply(env: Any, row: Mapping[str, Any], seed: int) -> Reply:
    """`env.reset`, checked."""
    found, where = env.reset(row, seed), f"{type(env).__name__}.reset"
    if isinstance(found, Move):
        return _of_move(found, players_of(env), where)
    if (
        isinstance(found, tuple)
        and len(found) == 2
        and isinstance(found[1], dict)
        and not isinstance(found[0], Mapping)
    ):
        raise BadReply(
            f"{where} returned a pair (observation, info), as Gymnasium's do; return the text to answer alone"
        )
    messages = _messages(found, where)
    if not messages:
        raise BadReply(f"{where} returned no messages; the policy needs something to answer")
    return Reply(messages={SOLO: messages})


def next_reply(env: Any, message: Message) -> Reply:
    """`env.step`, checked."""
    found, where = env.step(message), f"{type(env).__name__}.step"
    context = None
    if isinstance(found, Step):
        context = None if found.context is None else _messages(found.context, where, "context")
        if context == []:
            raise BadReply(f"{where} returned a context without messages; leave it out to continue the conversation")
        found = Move(
            speaker=SOLO,
            messages={SOLO: found.messages},
            rewards={} if found.reward is None else {SOLO: found.reward},
            done=found.done,
            truncated=found.truncated,
            counts=found.counts,
        )
        players: tuple[str, ...] = (SOLO,)
    else:
        players = players_of(env)
    if not isinstance(found, Move):
        raise BadReply(f"{where} returned {_no_step(found)}")
    reply = replace(_of_move(found, players, where), context=context)
    if not reply.done and not reply.messages.get(reply.speaker) and context is None and len(players_of(env)) == 1:
        raise BadReply(f"{where} returned no messages and is not done; the policy needs something to answer")
    return reply if not reply.done else _with_view(reply, env)


def last_reply(env: Any) -> Reply:
    """What an environment has to say when a limit cuts the episode off."""
    reward = env.final_reward() if hasattr(env, "final_reward") else None
    where = f"{type(env).__name__}.final_reward"
    rewards = {} if reward is None else {SOLO: _number(reward, where, "reward")}
    return _with_view(Reply(rewards=rewards, done=True, truncated=True), env)


def _of_move(move: Move, players: tuple[str, ...], where: str) -> Reply:
    for name in [*move.messages, *move.rewards, *([] if move.done else [move.speaker])]:
        if name not in players:
            raise BadReply(f"{where} spoke of a player {name!r}; the players are {', '.join(players)}")
    return Reply(
        speaker=move.speaker,
        messages={player: _messages(said, where) for player, said in move.messages.items()},
        rewards={player: _number(reward, where, "reward") for player, reward in move.rewards.items()},
        done=bool(move.done),
        truncated=bool(move.truncated),
        counts=_counts(move.counts, where),
    )


def _no_step(found: Any) -> str:
    """What was returned in the place of a Step, and what to do."""
    if isinstance(found, tuple) and len(found) in (4, 5):
        return (
            f"a tuple of {len(found)}, as Gymnasium's environments do; return rolecall.tasks.env.Step(messages=text, "
            "reward=reward, done=terminated or truncated, truncated=truncated), or register it with Gymnasium and name it "
            "gym:ID"
        )
    kind = f"a tuple of {len(found)}" if isinstance(found, tuple) else f"a {type(found).__name__}"
    return f"{'None' if found is None else kind}, not a Step (or, of a game, a Move) of rolecall.tasks.env"


def _messages(said: Any, where: str, what: str = "messages") -> list[dict[str, Any]]:
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    if isinstance(said, Mapping) or not isinstance(said, Sequence):
        raise BadReply(f"{where} returned a {type(said).__name__} as {what}, not a text or a list of messages")
    checked = []
    for message in said:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadReply(f"{where} returned {_short(message)} as a message; it needs `role` and `content`")
        if not isinstance(message.get("content"), str):
            raise BadReply(f"{where} returned a message whose content is {_short(message.get('content'))}, not a text")
        kept = {name: message[name] for name in ("role", "content", "name", "author") if message.get(name) is not None}
        checked.append({name: str(value) for name, value in kept.items()})
    return checked


def _number(value: Any, where: str, what: str) -> float:
    if isinstance(value, bool | int | float) or hasattr(value, "__float__"):
        found = float(value)
        if (why := out_of_range(found)) is None:
            return found
        raise BadReply(f"{where} returned the {what} {found}, which {why}")
    raise BadReply(f"{where} returned {_short(value)} as {what}, which is not a number")


def _counts(counts: Mapping[str, Any], where: str) -> dict[str, float]:
    return {str(name): _number(value, where, f"count `{name}`") for name, value in counts.items()}


def _with_view(reply: Reply, env: Any) -> Reply:
    held = getattr(env, "view", None)
    attributes = held() if callable(held) else getattr(env, "__dict__", {})
    plain = {name: value for name, value in attributes.items() if not name.startswith("_") and _is_plain(value)}
    return replace(reply, view=plain)


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return isfinite(value)
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, bool | int | str)


def _short(value: Any) -> str:
    return f"a {type(value).__name__} ({value!r:.60})"
