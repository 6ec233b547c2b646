"""`rolecall play`: print the episodes."""

import json
from collections.abc import Iterator
from math import isnan

from rolecall.config.play import PlayOptions
from rolecall.jobs.play import Conversation
from rolecall.jobs.play import run as play
from rolecall.maths.roles import Role
from rolecall.visible import visible_text, visible_token


def run(options: PlayOptions) -> None:
    """Each player's side of each episode."""
    for side in play(options):
        if options.json:
            print(json.dumps(_row(side), ensure_ascii=False))
            continue
        reward = "no reward" if side.reward is None else f"reward {side.reward:g}"
        turns = sum(len(t.turns) for t in side.trajectories)
        print(f"--- episode {side.episode}, {side.player}: {side.finish}, {turns} turns, {reward}")
        print("\n".join(_tokens(side) if options.show == "tokens" else _text(side)))
        if side.failure is not None:
            print(f"broken off: {visible_text(side.failure)}")


def _row(side: Conversation) -> dict[str, object]:
    return {
        "episode": side.episode,
        "player": side.player,
        "messages": [dict(message) for message in side.messages],
        "reward": side.reward,
        "finish": side.finish,
        "failure": side.failure,
        "samples": [
            {
                "ids": t.ids,
                "roles": [Role(role).name.lower() for role in t.roles],
                "authors": _authors(t),
                "logprobs": [None if isnan(value) else value for value in t.behaviour_logprobs or ()],
            }
            for t in side.trajectories
        ],
    }


def _text(side: Conversation) -> Iterator[str]:
    for message in side.messages:
        author = message.get("author", message["role"])
        yield f"{visible_text(str(author))}: {visible_text(message['content'])}"


def _tokens(side: Conversation) -> Iterator[str]:
    """A line per token. Only the policy's own have a log-prob, and only they train."""
    for number, (t, texts) in enumerate(zip(side.trajectories, side.tokens, strict=True)):
        if number:
            yield f"... the context was cut; sample {number + 1} goes on"
        yield "   pos  author      role         log-prob      id  token"
        rows = zip(_authors(t), t.roles, t.behaviour_logprobs or (), t.ids, texts, strict=True)
        for position, (author, role, logprob, token, text) in enumerate(rows):
            shown = f"{'-' if isnan(logprob) else f'{logprob:.3f}':>8}"
            name = visible_text(author)[:10]
            yield f"{position:6}  {name:10}  {Role(role).name.lower():11}  {shown}  {token:6}  {visible_token(text)}"


def _authors(trajectory: object) -> list[str]:
    runs = getattr(trajectory, "authors", None) or ()
    return [who for start, end, who in runs for _ in range(end - start)]
