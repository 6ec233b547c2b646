"""Experience from episodes of several turns, and how good a policy is at them."""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from rolecall.config.agents import AgentOptions
from rolecall.config.parts import ChatOptions
from rolecall.config.rl import RLOptions
from rolecall.errors import UserError
from rolecall.policy.load import LoadedModel
from rolecall.recipes.collect import Collected, run_state
from rolecall.recipes.evaluate import EVALUATION_STEP, Evaluation, kl_to
from rolecall.rewards.records import Reward, Sample, Scored
from rolecall.rollout.agents.conversation import Dialect
from rolecall.rollout.agents.play import Played, Player, Wanted
from rolecall.rollout.agents.pool import Envs
from rolecall.rollout.engine import Engine
from rolecall.tasks.rows import Rows
from rolecall.train.data import order_of
from rolecall.train.reference import Reference
from rolecall.train.timing import Timer
from rolecall.types import Finish, Sampling, Trajectory

_log = logging.getLogger("rolecall.agents")

_NAMED_FAILURES = 5
"""So many failures of a step are named one by one in the log; the rest are counted."""


class EnvOnly:
    """The reward of episodes that only their environment scores."""

    names: tuple[str, ...] = ()

    def score(self, samples: Sequence[Sample], *, state: Mapping[str, Any] | None = None) -> list[Scored]:
        """Nothing to add."""
        return [Scored(scores={}, total=None) for _ in samples]

    def take_metrics(self) -> dict[str, float]:
        """Nothing to tell."""
        return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """What one player of an episode did, and what it is worth."""

    player: str
    episode: Played
    trajectories: Sequence[Trajectory]
    """Its samples, in order."""
    scored: Scored
    row: int
    """The row that was played, by its place among those given."""


class Arena:
    """Plays rows and scores what comes of it: the environment's rewards, and those of reward functions beside them."""

    def __init__(
        self,
        *,
        policy: LoadedModel,
        engine: Engine,
        envs: Envs,
        reward: Reward,
        options: AgentOptions,
        chat: ChatOptions,
        timer: Timer | None = None,
    ) -> None:
        dialect = Dialect(
            tokenizer=policy.tokenizer,
            stop_ids=policy.stop_ids,
            template_kwargs=chat.chat_template_kwargs,
            system_prompt=chat.system_prompt,
        )
        self.policy, self.reward = policy, reward
        self.player = Player(
            engine=engine, envs=envs, dialect=dialect, options=options, context_length=policy.context_length
        )
        self.timer = timer or Timer()
        self.player.advance = self.timer.advance

    @property
    def players(self) -> tuple[str, ...]:
        """Who plays."""
        return self.player.envs.players

    def play(
        self,
        rows: Sequence[Mapping[str, Any]],
        sampling: Sampling,
        *,
        n: int,
        seed: int,
        step: int,
        groups: Sequence[int],
    ) -> list[Played]:
        """Each row n times. `groups` numbers the rows; a row's episodes share the seed of their environment."""
        wanted = [
            Wanted(prompt=i, sample=k, row=row, seed=_env_seed(seed, step, group))
            for i, (row, group) in enumerate(zip(rows, groups, strict=True))
            for k in range(n)
        ]
        episodes = self.player.play(wanted, sampling, seed=seed, step=step)
        _report_failures(episodes)
        return episodes

    def score(self, episodes: Sequence[Played], *, state: Mapping[str, Any], groups: Sequence[int]) -> list[Side]:
        """What each player who had a turn did, and its score. `state` is what rewards see as `trainer_state`."""
        found = [
            (episode, player, trajectories)
            for episode in episodes
            for player, trajectories in episode.trajectories(group=groups[episode.wanted.prompt]).items()
            if trajectories
        ]
        scored = self._score([(episode, player) for episode, player, _ in found], state)
        return [
            Side(
                player=player,
                episode=episode,
                trajectories=[replace(t, scores=dict(s.scores)) for t in trajectories],
                scored=s,
                row=episode.wanted.prompt,
            )
            for (episode, player, trajectories), s in zip(found, scored, strict=True)
        ]

    def _score(self, sides: Sequence[tuple[Played, str]], state: Mapping[str, Any]) -> list[Scored]:
        whole = [i for i, (episode, _) in enumerate(sides) if episode.finish is not Finish.ABORT]
        told = self.reward.score([_sample(*sides[i]) for i in whole], state=state)
        by_functions = dict(zip(whole, told, strict=True))
        return [
            _total(episode, player, by_functions.get(i), self.reward.names) for i, (episode, player) in enumerate(sides)
        ]

    def texts(self, side: Side) -> tuple[str, str]:
        """(the prompt as the model reads it, what was said then), for people."""
        first, conversation = side.trajectories[0], side.episode.sides[side.player]
        prompt = self.policy.tokenizer.decode(first.ids[: first.turns[0][0]])
        said = [m for m in conversation.messages if m["role"] != "system"]
        start = next(i for i, m in enumerate(said) if m["role"] == "assistant")
        return prompt, "\n".join(f"{m.get('author', m['role'])}: {m['content']}" for m in said[start:])


class Episodes:
    """The collector of episodes: prompts are taken from the rows in order, each is played `samples` times."""

    def __init__(
        self,
        options: RLOptions,
        arena: Arena,
        *,
        rows: Rows,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """Of every step's prompts, rank r of n takes each n-th, from the r-th on."""
        self.options, self.arena, self.rows, self.rank, self.ranks = options, arena, rows, rank, ranks
        self.order = order_of(rows, seed=options.seed)
        self._metrics: dict[str, float] = {}

    def collect(self, step: int) -> Collected:
        """Play the next rows and score what came of it."""
        o = self.options
        state = run_state(o, self.order, step, rank=self.rank)
        chosen = self.order.take(o.prompts)[self.rank :: self.ranks]
        groups = [step * o.prompts + i * self.ranks + self.rank for i in range(len(chosen))]
        seed = o.seed + self.rank * 2**32
        rows, timer = [self.rows[i] for i in chosen], self.arena.timer
        with timer.phase("generate"):
            episodes = self.arena.play(rows, o.sampling, n=o.samples, seed=seed, step=step, groups=groups)
        with timer.phase("reward"):
            sides = self.arena.score(episodes, state=state, groups=groups)
        if not sides:
            why = next((e.failure for e in episodes if e.failure), "no player had a turn")
            raise UserError(
                f"all {len(episodes)} episodes of step {step + 1} were broken off before the first turn: {why}"
            )
        self._metrics = _measured(episodes, sides, self.arena.players)
        texts = [self.arena.texts(side) for side in sides]
        flat = [(t, side, *text) for side, text in zip(sides, texts, strict=True) for t in side.trajectories]
        return Collected(
            trajectories=[t for t, *_ in flat],
            prompts=[prompt for *_, prompt, _ in flat],
            answers=[answer for *_, answer in flat],
            scored=[side.scored for _, side, *_ in flat],
            rows=[chosen[side.row] for _, side, *_ in flat],
            seed=seed,
            messages=[side.episode.sides[side.player].messages for _, side, *_ in flat],
        )

    def take_metrics(self) -> dict[str, float]:
        """What is known of the last step's episodes beside their scores."""
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        """The position in the rows."""
        return {"order": self.order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.order.load_state_dict(state["order"])


class EpisodeEvaluator:
    """Evaluates whatever weights the engine holds, always on the same rows with the same random numbers."""

    def __init__(
        self,
        arena: Arena,
        *,
        rows: Rows,
        sampling: Sampling,
        samples: int = 1,
        seed: int = 0,
        reference: Reference | None = None,
        state_at: Callable[[int], Mapping[str, Any]] | None = None,
    ) -> None:
        """With `samples` > 1 also avg@k and pass@k and, given a reference, the KL to it on those samples. `state_at(step)`
        is what rewards see as `trainer_state`."""
        self.arena, self.rows, self.sampling, self.samples = arena, rows, sampling, samples
        self.seed, self.reference = seed, reference
        self._state: Mapping[str, Any] = {}
        self._state_at = state_at or (lambda step: {"global_step": step})

    def __call__(self, step: int) -> dict[str, float]:
        """The numbers alone."""
        self._state = self._state_at(step)
        return self.run().numbers

    def run(self) -> Evaluation:
        """Play every row greedily, and `samples` times at the sampling temperature if asked."""
        episodes, sides = self._play(replace(self.sampling, temperature=0.0), 1)
        first = {side.row: side for side in sides if side.player == self.arena.players[0]}
        totals = [first[i].scored.total if i in first else None for i in range(len(self.rows))]
        known = [total for total in totals if total is not None]
        numbers = {"reward": sum(known) / len(known)} if known else {}
        measured = _measured(episodes, sides, self.arena.players)
        numbers |= {
            "accuracy": sum(t >= 1 for t in known) / len(totals),
            "mean_length": sum(s.episode.sides[s.player].policy_tokens for s in sides) / max(1, len(sides)),
            "mean_turns": measured["agents/turns"],
            "clipped_ratio": sum(e.finish is not None and e.finish.truncated for e in episodes) / len(episodes),
            "failed": sum(t is None for t in totals) / len(totals),
        }
        numbers |= {n.removeprefix("agents/"): v for n, v in measured.items() if n.startswith("agents/reward/")}
        if self.samples > 1:
            numbers |= self._sampled()
        answers = [self.arena.texts(first[i])[1] if i in first else "" for i in range(len(self.rows))]
        prompts = [row.get("prompt", "") for row in self.rows]
        return Evaluation(numbers=numbers, prompts=prompts, answers=answers, scores=totals)

    def _sampled(self) -> dict[str, float]:
        _, sides = self._play(self.sampling, self.samples)
        right: dict[int, list[bool]] = {i: [] for i in range(len(self.rows))}
        for side in sides:
            if side.player == self.arena.players[0]:
                right[side.row].append(side.scored.total is not None and side.scored.total >= 1)
        count = len(self.rows)
        numbers = {
            f"avg@{self.samples}": sum(map(sum, right.values())) / (count * self.samples),
            f"pass@{self.samples}": sum(map(any, right.values())) / count,
        }
        if self.reference is not None:
            trajectories = [t for side in sides for t in side.trajectories]
            kl = kl_to(self.reference, trajectories, temperature=self.sampling.scoring_temperature)
            numbers["kl"] = float(kl.sum()) / len(sides)
        return numbers

    def _play(self, sampling: Sampling, n: int) -> tuple[list[Played], list[Side]]:
        rows = [self.rows[i] for i in range(len(self.rows))]
        step, groups = EVALUATION_STEP, list(range(len(rows)))
        episodes = self.arena.play(rows, sampling, n=n, seed=self.seed, step=step, groups=groups)
        sides = self.arena.score(episodes, state=self._state, groups=groups)
        self.arena.reward.take_metrics()  # so that what evaluations log and count is not mistaken for training's
        return episodes, sides


def _env_seed(seed: int, step: int, group: int) -> int:
    """The seed of the environments of one prompt: another step or prompt gives another."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{group}".encode()).digest()[:6])


def _sample(episode: Played, player: str) -> Sample:
    side = episode.sides[player]
    start = next(i for i, message in enumerate(side.messages) if message["role"] == "assistant")
    ids = [i for sample in side.samples for first, last in sample.turns for i in sample.ids[first:last]]
    return Sample(
        prompt=side.messages[:start],
        completion=side.messages[start:],
        completion_ids=ids,
        row=episode.wanted.row,
        prompt_index=episode.wanted.prompt,
        sample_index=episode.wanted.sample,
        environment=SimpleNamespace(**episode.view),
    )


def _total(episode: Played, player: str, told: Scored | None, names: Sequence[str]) -> Scored:
    if told is not None:
        return with_env(episode.rewards.get(player), told)
    failure = f"the episode was broken off: {episode.failure}"
    return Scored(scores={"env": None, **dict.fromkeys(names)}, total=None, failure=failure)


def with_env(own: float | None, told: Scored) -> Scored:
    """The environment's reward and the functions' together. Neither is 0 for being absent."""
    parts = [part for part in (own, told.total) if part is not None]
    failure = told.failure
    if not parts and failure is None:
        failure = "the environment gave no reward, and there is no reward function"
    total = None if failure is not None else sum(parts)
    return Scored(scores={"env": own, **told.scores}, total=total, failure=failure, extras=told.extras)


def _measured(episodes: Sequence[Played], sides: Sequence[Side], players: Sequence[str]) -> dict[str, float]:
    """Means over episodes of what was counted, how they ended, and each player's reward where there are several."""
    names = sorted({"turns", *(name for episode in episodes for name in episode.counts)})
    ends = Counter(str(episode.finish) for episode in episodes)
    found = {f"agents/{name}": sum(e.counts.get(name, 0.0) for e in episodes) / len(episodes) for name in names}
    found |= {f"agents/finish/{finish}": ends[finish] / len(episodes) for finish in Finish if ends[finish]}
    found["agents/samples"] = sum(len(side.trajectories) for side in sides) / len(episodes)
    if len(players) > 1:
        for player in players:
            known = [s.scored.total for s in sides if s.player == player and s.scored.total is not None]
            if known:
                found[f"agents/reward/{player}"] = sum(known) / len(known)
    return found


def _report_failures(episodes: Sequence[Played]) -> None:
    failed = [episode for episode in episodes if episode.failure is not None]
    for episode in failed[:_NAMED_FAILURES]:
        place = f"prompt {episode.wanted.prompt} sample {episode.wanted.sample}"
        _log.warning("the episode of %s was broken off: %s", place, episode.failure)
    if len(failed) > _NAMED_FAILURES:
        _log.warning("%d more episodes were broken off", len(failed) - _NAMED_FAILURES)
