"""`rolecall play`: episodes to look at."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rolecall.agents.episodes import EnvOnly
from rolecall.config.merge import make
from rolecall.config.parts import HeldOutOptions
from rolecall.config.play import PlayOptions
from rolecall.jobs.agents import EnvSource, env_label, episode_rows, open_arena, open_envs
from rolecall.jobs.models import open_model, sampler, with_model
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
    settings |= {"rows": rows} if isinstance(rows, str) else {}
    options = make(PlayOptions, {**with_model(settings), "env": env_label(env)})
    return run(options, env=None if isinstance(env, str) else env, rows=None if isinstance(rows, str) else rows)


def run(options: PlayOptions, *, env: EnvSource | None = None, rows: RowsSource | None = None) -> list[Conversation]:
    """Play from options; an environment and rows that are objects take the place of the named ones."""
    source = options.env if env is None else env
    with ExitStack() as stack:
        how = HeldOutOptions(every=1, rows=options.n)
        given = options.rows if rows is None else rows
        if given is not None:
            how = HeldOutOptions()
        learnt = prompting_of(options.model)
        prompts = {"prompt": options.agent.prompt, "learned": learnt.prompt_in(source)}
        train, test = episode_rows(source, given, how, n=options.n, seed=options.seed, **prompts)
        found = train if test is None else test
        chosen = dict(enumerate(head(found, options.n)))
        envs = open_envs(source, options.agent, stack)
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
