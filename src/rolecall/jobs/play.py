"""`rolecall play`: episodes to look at."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rolecall.agents.episodes import EnvOnly
from rolecall.config.given import resolve_source
from rolecall.config.parts import HeldOutOptions
from rolecall.config.use import PlayOptions
from rolecall.jobs.agents import EnvSource, episode_rows, open_arena, open_envs
from rolecall.jobs.arguments import options_of
from rolecall.jobs.models import open_model, sampler
from rolecall.jobs.prompting import prompting_of
from rolecall.policy.load import reading
from rolecall.policy.token_text import token_texts
from rolecall.tasks.sources import RowsSource
from rolecall.tasks.streams import head
from rolecall.types import Finish, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One player's side of an episode."""

    episode: int
    """Which of the episodes."""
    player: str
    messages: Sequence[Mapping[str, Any]]
    """All that was said to it and by it."""
    reward: float | None
    """What the environment gave it."""
    finish: Finish
    """Why the episode ended."""
    failure: str | None
    """What went wrong, if it was broken off."""
    trajectories: tuple[Trajectory, ...]
    """Its samples: every token with role, author and log-prob. Several where the context was cut."""
    tokens: tuple[tuple[str, ...], ...]
    """The text of each token of each sample."""


def play(*, env: EnvSource, rows: RowsSource | None = None, **settings: Any) -> list[Conversation]:
    """Play episodes: `play(model="runs/agent", env="calculator", n=4)`. `env` may be a class, `rows` a list of dicts."""
    return run(options_of(PlayOptions, {**settings, "env": env, "rows": rows}))


def run(options: PlayOptions) -> list[Conversation]:
    source = resolve_source(options.env, "environment")
    with ExitStack() as stack:
        how = HeldOutOptions(every=1, rows=options.n) if options.rows is None else HeldOutOptions()
        learnt = prompting_of(options.model)
        prompts: dict[str, Any] = {
            "prompt": options.agent.prompt,
            "learned": learnt.prompt_in(source),
            "agent": options.agent,
        }
        train, test = episode_rows(source, options.rows, how, n=options.n, seed=options.seed, **prompts)
        found = train if test is None else test
        chosen = dict(enumerate(head(found, options.n)))
        envs = open_envs(source, options.agent, stack, options.sampling)
        policy = open_model(options.model, **reading(options.policy))
        chat = learnt.filled(options.chat)
        arena = open_arena(
            envs, options.agent, policy=policy, engine=sampler(policy, options), reward=EnvOnly(), chat=chat
        )
        groups = {number: number for number in chosen}
        episodes = arena.play(chosen, options.sampling, n=1, seed=options.seed, step=0, groups=groups)
    return [
        Conversation(
            episode=i,
            player=player,
            messages=tuple(episode.sides[player].messages),
            reward=episode.rewards.get(player),
            finish=episode.finish or Finish.ABORT,
            failure=episode.failure,
            trajectories=tuple(trajectories),
            tokens=tuple(tuple(token_texts(policy.tokenizer, t.ids)) for t in trajectories),
        )
        for i, episode in enumerate(episodes)
        for player, trajectories in episode.trajectories(group=i).items()
    ]
