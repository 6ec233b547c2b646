"""Experience from episodes of several turns, and how good a policy is at them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from rolecall.agents.conversation import Dialect
from rolecall.agents.counted import Ended, ended_everywhere, ended_here, measured, result_of
from rolecall.agents.guided import Lessons
from rolecall.agents.judging import Judge, with_turns
from rolecall.agents.play import Player
from rolecall.agents.played import Played, Recall, Side, Wanted, env_seed, report_failures
from rolecall.agents.pool import Envs
from rolecall.agents.programs import ProgramPlayer, Programs
from rolecall.config.agents import AgentOptions
from rolecall.config.parts import ChatOptions
from rolecall.config.rl import RLOptions
from rolecall.errors import UserError
from rolecall.policy.load import LoadedModel
from rolecall.recipes.collect import Collected, RowsCollector
from rolecall.recipes.evaluate import EVALUATION_STEP, Evaluation, HeldOut, kl_to
from rolecall.rewards.records import Reward, Sample, Scored
from rolecall.rewards.scoring import scorer
from rolecall.rollout.engine import Engine
from rolecall.tasks.rows import Rows
from rolecall.train.ranks import Ranks
from rolecall.train.timing import Timer
from rolecall.types import Finish, Sampling


class EnvOnly:
    """The reward of episodes that only their environment scores."""

    names: tuple[str, ...] = ()

    def score(self, samples: Sequence[Sample], *, state: Mapping[str, Any] | None = None) -> list[Scored]:
        return [Scored(scores={}, total=None) for _ in samples]

    def take_metrics(self) -> dict[str, float]:
        return {}


class Arena:
    """Plays rows and scores what comes of it: the environment's rewards, and those of reward functions beside them."""

    def __init__(
        self,
        *,
        policy: LoadedModel,
        engine: Engine,
        envs: Envs | Programs,
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
        how: dict[str, Any] = {"dialect": dialect, "options": options, "context_length": policy.context_length}
        self.player: Player | ProgramPlayer = (
            ProgramPlayer(engine=engine, programs=envs, model=policy.name, **how)
            if isinstance(envs, Programs)
            else Player(engine=engine, envs=envs, **how)
        )
        self.timer = timer or Timer()
        self.player.advance = self.timer.advance

    @property
    def players(self) -> tuple[str, ...]:
        return self.player.players

    def play(
        self,
        rows: Mapping[int, Mapping[str, Any]],
        sampling: Sampling,
        *,
        n: int,
        seed: int,
        step: int,
        groups: Mapping[int, int],
        recall: Recall | None = None,
        guided: int = 0,
    ) -> list[Played]:
        """Each row n times; rows and their groups are given by the number of the prompt in the step. A row's episodes share
        the seed of their environment; the first `guided` of them read what `recall` finds."""
        wanted = [
            Wanted(
                prompt=number,
                sample=k,
                row=row,
                seed=env_seed(seed, step, groups[number]),
                recall=recall if k < guided else None,
            )
            for number, row in rows.items()
            for k in range(n)
        ]
        episodes = self.player.play(wanted, sampling, seed=seed, step=step)
        report_failures(episodes)
        return episodes

    def play_and_score(
        self,
        rows: Mapping[int, Mapping[str, Any]],
        sampling: Sampling,
        *,
        state: Mapping[str, Any],
        n: int,
        seed: int,
        step: int,
        groups: Mapping[int, int],
        phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
        **lessons: Any,
    ) -> tuple[list[Played], list[Side]]:
        """Episodes (`play`, which takes `lessons`), and what each player who had a turn did, and its score. `state` is what rewards see as
        `trainer_state`. Functions that take one answer are called and judges asked as episodes end; functions that take all,
        and models, when all are over."""
        places = {(prompt, k): i * n + k for i, prompt in enumerate(rows) for k in range(n)}
        with scorer(self.reward, state) as scoring:

            def ended(episode: Played) -> None:
                place = places[episode.wanted.prompt, episode.wanted.sample] * len(self.players)
                scoring.add({place + self.players.index(p): _sample(e, p) for e, p in _whole([episode])})

            self.player.ended, self.player.between = ended, scoring.poll
            with phase("generate"):
                episodes = self.play(rows, sampling, n=n, seed=seed, step=step, groups=groups, **lessons)
            with phase("reward"):
                return episodes, self._sides(episodes, scoring.finish(), groups)

    def _sides(
        self, episodes: Sequence[Played], by_functions: Sequence[Scored], groups: Mapping[int, int]
    ) -> list[Side]:
        """`by_functions` is what reward functions say of the sides of `_whole`, in order."""
        told = dict(zip(((id(episode), player) for episode, player in _whole(episodes)), by_functions, strict=True))
        found = []
        for episode in episodes:
            for player, trajectories in episode.trajectories(group=groups[episode.wanted.prompt]).items():
                if not trajectories:
                    continue
                if episode.finish is Finish.ABORT:
                    failure = f"the episode was broken off: {episode.failure}"
                    scores = {"env": None, **dict.fromkeys(self.reward.names)}
                    scored = Scored(scores=scores, total=None, failure=failure)
                else:
                    scored = with_env(episode.rewards.get(player), told[id(episode), player])
                if read := episode.lessons.get(player):
                    scored = replace(scored, extras={**scored.extras, "lessons": list(read)})
                if len(episode.began) > 1:
                    scored = replace(scored, extras={**scored.extras, "began": list(episode.began)})
                named = [replace(t, scores=dict(scored.scores)) for t in trajectories]
                found.append(Side(player=player, episode=episode, trajectories=named, scored=scored))
        return found

    def texts(self, side: Side) -> tuple[str, str]:
        """(the prompt as the model reads it, what was said then), for people."""
        first, conversation = side.trajectories[0], side.episode.sides[side.player]
        prompt = self.policy.tokenizer.decode(first.ids[: first.turns[0][0]])
        said = [m for m in conversation.messages if m["role"] != "system"]
        start = next(i for i, m in enumerate(said) if m["role"] == "assistant")
        return prompt, "\n".join(f"{m.get('author', m['role'])}: {m['content']}" for m in said[start:])


class Episodes(RowsCollector):
    """The collector of episodes: prompts are taken from the rows in order, each is played `samples` times."""

    def __init__(
        self,
        options: RLOptions,
        arena: Arena,
        *,
        rows: Rows,
        ranks: Ranks | None = None,
        lessons: Lessons | None = None,
        judge: Judge | None = None,
    ) -> None:
        """`judge` is asked about turns of which no reward function says something."""
        super().__init__(options, rows, ranks=ranks)
        self.arena, self.lessons, self.judge = arena, lessons, judge
        self._ended: list[Ended] = []
        self._learned: dict[str, float] = {}

    def collect(self, step: int) -> Collected:
        """Play the next rows and score what came of it."""
        o = self.options
        state, chosen = self.state_at(step), self.take()
        rows = {number: self.rows[i] for number, i in chosen.items()}
        groups = {number: step * o.prompts + number for number in chosen}
        how: dict[str, Any] = {"n": o.samples, "seed": o.seed, "step": step, "groups": groups}
        if self.lessons is not None:
            how |= {"recall": self.lessons.pool.recall, "guided": self.lessons.guided(o.samples)}
        episodes, sides = self.arena.play_and_score(rows, o.sampling, state=state, phase=self.arena.timer.phase, **how)
        if o.algorithm.credit != "episode":
            sides = with_turns(sides, self.judge)
        if not sides:
            why = next((e.failure for e in episodes if e.failure), "no player had a turn")
            raise UserError(
                f"all {len(episodes)} episodes of step {step + 1} were broken off before the first turn: {why}"
            )
        self._ended = ended_here(episodes, [(side, result_of(side)) for side in sides])
        lines: list[dict[str, Any]] = []
        if self.lessons is not None:
            with self.arena.timer.phase("lessons"):
                lines, self._learned = self.lessons.learn(step, sides)
        texts = [self.arena.texts(side) for side in sides]
        flat = [(t, side, *text) for side, text in zip(sides, texts, strict=True) for t in side.trajectories]
        return Collected(
            trajectories=[t for t, *_ in flat],
            prompts=[prompt for *_, prompt, _ in flat],
            answers=[answer for *_, answer in flat],
            scored=[side.scored for _, side, *_ in flat],
            rows=[chosen[side.row] for _, side, *_ in flat],
            seed=o.seed,
            messages=[side.episode.sides[side.player].messages for _, side, *_ in flat],
            lessons=lines,
        )

    def take_metrics(self) -> dict[str, float]:
        """What is known of the last step's episodes beside their scores: all ranks ask."""
        return self.metrics_later()()

    def metrics_later(self) -> Callable[[], dict[str, float]]:
        """The same, for when all ranks can meet."""
        ended, learned = self._ended, self._learned
        return lambda: measured(ended_everywhere(ended, self.ranks), self.arena.players) | learned

    def state_dict(self) -> dict[str, Any]:
        """The position in the rows, and the lessons."""
        lessons = {} if self.lessons is None else {"lessons": self.lessons.pool.state_dict()}
        return super().state_dict() | lessons

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.lessons is not None:
            self.lessons.pool.load_state_dict(state.get("lessons"))


class EpisodeEvaluator(HeldOut):
    """Of episodes."""

    def __init__(self, arena: Arena, **how: Any) -> None:
        """`how` is for `HeldOut`."""
        super().__init__(**how)
        self.arena = arena

    def run(self) -> Evaluation:
        episodes = self._play(replace(self.sampling, temperature=0.0), 1)
        first = {episode.row: episode.sides.get(self.arena.players[0]) for episode in episodes}
        own = [first[i] for i in range(len(self.rows))]
        totals = [side.total if side is not None else None for side in own]
        known = [total for total in totals if total is not None]
        numbers = {"reward": sum(known) / len(known)} if known else {}
        counted = measured(episodes, self.arena.players)
        sides = [side for episode in episodes for side in episode.sides.values()]
        numbers |= {
            "accuracy": sum(t >= 1 for t in known) / len(totals),
            "mean_length": sum(side.tokens for side in sides) / max(1, len(sides)),
            "mean_turns": counted["agents/turns"],
            "clipped_ratio": sum(e.finish is not None and e.finish.truncated for e in episodes) / len(episodes),
            "failed": sum(t is None for t in totals) / len(totals),
        }
        numbers |= {n.removeprefix("agents/"): v for n, v in counted.items() if n.startswith("agents/reward/")}
        if self.samples > 1:
            numbers |= self._sampled()
        prompts = [row.get("prompt", "") for row in self.rows]
        answers = [side.text if side is not None else "" for side in own]
        return Evaluation(numbers=numbers, prompts=prompts, answers=answers, scores=totals)

    def _sampled(self) -> dict[str, float]:
        episodes = self._play(self.sampling, self.samples, sampled=True)
        right: dict[int, list[bool]] = {i: [] for i in range(len(self.rows))}
        for episode in episodes:
            side = episode.sides.get(self.arena.players[0])
            if side is not None:
                right[episode.row].append(side.total is not None and side.total >= 1)
        count = len(self.rows)
        numbers = {
            f"avg@{self.samples}": sum(map(sum, right.values())) / (count * self.samples),
            f"pass@{self.samples}": sum(map(any, right.values())) / count,
        }
        if self.reference is not None:
            sides = [side for episode in episodes for side in episode.sides.values()]
            numbers["kl"] = float(torch.tensor([kl for side in sides for kl in side.kl]).sum()) / len(sides)
        return numbers

    def _play(self, sampling: Sampling, n: int, *, sampled: bool = False) -> list[Ended]:
        """Every row n times, in order. Each rank plays its share of the rows, and all get what is counted of all."""
        rows = {i: self.rows[i] for i in self.ranks.share(range(len(self.rows)))}
        groups = {number: number for number in rows}
        episodes, sides = self.arena.play_and_score(
            rows, sampling, state=self.state, n=n, seed=self.seed, step=EVALUATION_STEP, groups=groups
        )
        self.arena.reward.take_metrics()  # so that what evaluations log and count is not mistaken for training's
        if not sampled:
            results = [result_of(side, text=self.arena.texts(side)[1]) for side in sides]
        elif self.reference is None:
            results = [result_of(side) for side in sides]
        else:
            trajectories = [t for side in sides for t in side.trajectories]
            each = iter(kl_to(self.reference, trajectories, temperature=self.sampling.scoring_temperature).tolist())
            results = [result_of(side, kl=[next(each) for _ in side.trajectories]) for side in sides]
        return ended_everywhere(ended_here(episodes, list(zip(sides, results, strict=True))), self.ranks)


def _whole(episodes: Sequence[Played]) -> list[tuple[Played, str]]:
    """Players who had a turn, of episodes that were not broken off."""
    return [(e, p) for e in episodes if e.finish is not Finish.ABORT for p, side in e.sides.items() if side.samples]


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


def with_env(own: float | None, by_functions: Scored) -> Scored:
    """The environment's reward and the functions' together. Neither is 0 for being absent."""
    parts = [part for part in (own, by_functions.total) if part is not None]
    failure = by_functions.failure
    if not parts and failure is None:
        failure = "the environment gave no reward, and there is no reward function"
    total = None if failure is not None else sum(parts)
    return Scored(scores={"env": own, **by_functions.scores}, total=total, failure=failure, extras=by_functions.extras)
