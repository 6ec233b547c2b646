"""Options of `rolecall rl`, and its presets."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from rolecall.config.agents import AGENT_FLAG, AgentOptions, LessonOptions
from rolecall.config.algorithm import COMPARING as COMPARING
from rolecall.config.algorithm import KL_IN_REWARD as KL_IN_REWARD
from rolecall.config.algorithm import AlgorithmOptions as AlgorithmOptions
from rolecall.config.experience import ReplayOptions, StoreOptions
from rolecall.config.foreign import Foreign
from rolecall.config.foreign_trl import TRL
from rolecall.config.foreign_verl import VERL
from rolecall.config.memory import memory_line
from rolecall.config.parts import SERVED_ONLY, AnsweringOptions, TrainingOptions
from rolecall.config.plan import logits_line, passes_line, ranks_line
from rolecall.config.rl_presets import PRESETS


@dataclass(frozen=True, kw_only=True)
class RLOptions(AnsweringOptions, TrainingOptions):
    """Reinforcement learning of a language model from a reward."""

    command: ClassVar[str] = "rl"
    presets: ClassVar[dict[str, dict[str, Any]]] = PRESETS
    foreign: ClassVar[tuple[Foreign, ...]] = (*TRL, *VERL)
    either: ClassVar[tuple[str, ...]] = ("steps", "epochs")
    rows: str | None = None
    """Prompts: a file of rows, a Hugging Face dataset (saved, or owner/name on the hub), a built-in task, or rg:NAME.
    Left out: those of `env`, or else `addition`."""
    env: str | None = field(default=None, metadata=AGENT_FLAG)
    """Play episodes of several turns in it: calculator, guessing, kuhn, file.py:Class, gym:ID, openenv:URL and others of
    docs/agents.md; or agent:file.py:function and agent:COMMAND, your own program, for which `--agent file.py:function` is
    short. `rows` are what it starts from; left out, its own, or seeds."""
    agent: AgentOptions = field(default_factory=AgentOptions)
    blackout: tuple[str, ...] = ()
    """Texts that never train where the policy writes them, such as a frame it must keep to."""
    steps: int = 100
    """Rollouts to train on."""
    epochs: float | None = None
    """Passes over the training rows, in place of steps."""
    prompts: int = 16
    """Prompts per rollout."""
    samples: int = 8
    """Answers per prompt."""
    algorithm: AlgorithmOptions = field(default_factory=AlgorithmOptions)
    replay: ReplayOptions = field(default_factory=ReplayOptions)
    lessons: LessonOptions = field(default_factory=LessonOptions)
    from_run: str | None = field(default=None, metadata={"flag": "from"})
    """Train on the rollouts that this run left, in their order, without sampling: rows and rewards are not asked. A directory, or
    what was a run's `store.url`."""
    store: StoreOptions = field(default_factory=StoreOptions)
    ahead: int = field(default=0, metadata={"flag": "async.ahead"})
    """Steps that sampling runs ahead of training, in parallel with it: step s is sampled by version s - ahead of the weights
    (docs/cluster.md). 0: a step is sampled when the one before has trained."""
    inflight: bool = field(default=False, metadata={"flag": "async.inflight"})
    """Answers in progress continue with each new version of the weights: none of their tokens is older than `async.ahead` versions,
    but what is learned depends on timing, and cannot be repeated exactly."""
    seed: int = 0
    """Seeds everything: data order, sampling, new heads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_one("steps", "prompts", "samples")
        self._shared_out("prompts")
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature 0 gives the same answer every time: there is nothing to compare; use 1"
            )
        if self.algorithm.minibatches > self.prompts * self.samples:
            raise ValueError(
                f"{self.prompts} x {self.samples} answers cannot be cut into {self.algorithm.minibatches} mini-batches"
            )
        name, buffer = self.algorithm.name, self.algorithm.overlong_buffer
        if name in COMPARING and self.samples < 2:
            raise ValueError(f"{name} compares the answers to a prompt: samples must be at least 2")
        if self.env is not None and self.algorithm.resample:
            raise ValueError("episodes of an environment are not drawn again: set algorithm.resample 0")
        if self.env is None and self.from_run is None and self.algorithm.credit != "episode":
            raise ValueError(
                f"algorithm.credit {self.algorithm.credit} compares turns, and an answer to a row has one: give env too"
            )
        if self.env is not None and name == "remax":
            raise ValueError("remax needs a greedy answer per prompt, which episodes of an environment lack: use rloo")
        if buffer is not None and buffer > self.sampling.max_new_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer {buffer:g} is longer than sampling.max_new_tokens "
                f"{self.sampling.max_new_tokens}; below 1 it is a share of it"
            )
        self._check_replay()
        self._check_ahead()
        self._check_lessons()
        self._check_dropout()

    def _check_replay(self) -> None:
        o, replay = self.algorithm, self.replay
        if self.from_run is not None:
            if self.epochs is not None:
                raise ValueError("epochs counts passes over rows, and with --from none are read: give steps")
            if replay.on:
                raise ValueError("with --from everything is replayed already: leave out replay.share and replace_flat")
            if o.old_logprobs not in ("auto", self.old_source):
                raise ValueError(
                    f"with --from the ratio is to the policy that sampled, so algorithm.old_logprobs {o.old_logprobs} would "
                    "leave out who that was; leave it auto, and set replay.weights for a correction by weights instead"
                )
            if o.policy_loss == "reinforce" and replay.weights == "none":
                raise ValueError(
                    "reinforce has no ratio to correct for who sampled: set replay.weights truncate, or use grpo"
                )
            if o.resample:
                raise ValueError("with --from nothing is sampled, so nothing can be replaced: set algorithm.resample 0")
        elif replay.weights == "truncate" and not replay.decoupled and (replay.on or not replay.weigh_fresh):
            raise ValueError(
                "replay.weights truncate needs replay.decoupled: otherwise the ratio is the weight, and the clips bound it"
            )
        if o.name == "remax" and (replay.on or self.from_run is not None):
            raise ValueError("remax compares with greedy answers of the same step, which stored answers lack: use rloo")
        if replay.decoupled and self.old_source == "detach":
            raise ValueError("replay.decoupled needs old log-probs: set algorithm.old_logprobs recompute")
        if replay.weigh_fresh and self.algorithm.old_source != "recompute" and self.sampled_now:
            raise ValueError(
                "replay.weigh_fresh needs the trainer's own log-probs: set algorithm.old_logprobs recompute"
            )
        if replay.on and o.credit != "episode":
            raise ValueError(
                f"algorithm.credit {o.credit} needs what turns were given, which replay does not keep: leave one out"
            )
        if replay.normalise == "joint" and o.bootstrap_truncated:
            raise ValueError("replay.normalise joint does not go with algorithm.bootstrap_truncated: use separate")

    def _check_ahead(self) -> None:
        if self.ahead < 0:
            raise ValueError(f"async.ahead is a number of steps, 0 or more, got {self.ahead}")
        if self.ahead and self.from_run is not None:
            raise ValueError("with --from nothing is sampled, so nothing can be sampled ahead: leave out async.ahead")
        if self.inflight and not self.ahead:
            raise ValueError("async.inflight needs async.ahead, by how many versions a token may be old: set 1 or more")
        if self.inflight and (self.engine.servers or self.engine.cluster != "none" or self.engine.name == "hf"):
            raise ValueError(
                "async.inflight works with the native engine, in this process or in engine.workers of this machine: leave out "
                "engine.servers and engine.cluster"
            )

    def _check_lessons(self) -> None:
        o, lessons = self.algorithm, self.lessons
        if not lessons.on:
            return
        if self.from_run is not None:
            raise ValueError("with --from nothing is sampled, so nobody reads lessons: leave out lessons.share")
        if round(lessons.share * self.samples) == 0:
            raise ValueError(
                f"lessons.share {lessons.share:g} of {self.samples} episodes is none: raise it, or raise samples"
            )
        by_behaviour = lessons.ratio == "behaviour"
        if by_behaviour and o.policy_loss == "reinforce":
            raise ValueError(
                "reinforce has no ratio to correct for lessons that only the behaviour read: set lessons.ratio recomputed, or "
                "use grpo"
            )
        if o.old_logprobs == "behaviour" or (by_behaviour and o.old_logprobs == "detach"):
            raise ValueError(
                f"with lessons some samples have the behaviour's log-probs as old ones and others the trainer's, so "
                f"algorithm.old_logprobs {o.old_logprobs} does not go with lessons.ratio {lessons.ratio}: leave it auto"
            )
        if lessons.clip_high is not None and o.policy_loss == "reinforce":
            raise ValueError("reinforce clips no ratio: leave out lessons.clip_high, or use grpo")

    def _check_dropout(self) -> None:
        """A pass that drops gives other log-probs and values than the one that sampled: they must not be compared."""
        rate, o = self.policy.lora_dropout, self.algorithm
        if not rate:
            return
        unlike = "log-probs of sampling and training must agree where they are compared, and those of a pass that drops do not"
        if self.from_run is not None or self.replay.on:
            raise ValueError(
                f"policy.lora_dropout {rate:g} does not go with stored answers: {unlike}; set it to 0, or leave out --from "
                "and replay"
            )
        if self.old_source != "detach":
            raise ValueError(
                f"policy.lora_dropout {rate:g} does not go with old log-probs from {self.old_source}: {unlike}; set "
                "algorithm.old_logprobs detach with algorithm.epochs 1 and algorithm.minibatches 1, or policy.lora_dropout 0"
            )
        if o.kl_coef and o.kl_in == "loss":
            raise ValueError(
                f"policy.lora_dropout {rate:g} does not go with the KL in the loss: {unlike}; set algorithm.kl_in reward "
                "with algorithm.old_logprobs detach, or policy.lora_dropout 0"
            )
        if o.critic == "shared":
            raise ValueError(
                f"policy.lora_dropout {rate:g} does not go with a critic on the policy's trunk, whose old and new values "
                "must agree: set algorithm.critic separate, or policy.lora_dropout 0"
            )

    @property
    def sampled_now(self) -> bool:
        """Whether the fresh answers of a step are sampled from the policy, not read from a store."""
        return self.from_run is None

    @property
    def precisions(self) -> tuple[str, str]:
        """The dtypes that the engine and the trainer compute in."""
        mixed = self.policy.mixed_precision == "bf16"
        return self.engine.dtype or self.policy.dtype, "bfloat16" if mixed else self.policy.dtype

    @property
    def _unlike(self) -> str | None:
        """In what the engine differs from the trainer, so that it samples a little off; None: in nothing."""
        engine, trainer = self.precisions
        if engine != trainer:
            return f"the engine samples in {engine} and the trainer computes in {trainer}"
        kind = self.engine.name
        return f"the engine is {kind}, with kernels of its own" if kind in SERVED_ONLY else None

    @property
    def fresh_weights(self) -> ReplayOptions | None:
        """How the answers of a step are weighed by how likely the trainer finds them against who sampled them; None:
        not at all. Old log-probs that the user chose are left alone, so nothing is weighed without being asked then."""
        replay = self.replay
        if replay.weigh_fresh or not self.sampled_now:
            return None if replay.weights == "none" else replay
        chosen = self.algorithm.old_logprobs not in ("auto", "recompute")
        if replay.weigh_fresh is False or chosen or not (self.ahead or self._unlike):
            return None
        if self.ahead:
            return replace(replay, weights="truncate", weights_level="token", weights_low=0.0, weights_high=2.0)
        return replace(replay, weights="truncate", weights_level="sequence", weights_low=0.0, weights_high=3.0)

    @property
    def old_source(self) -> str:
        """Where old log-probs really come from."""
        if self.sampled_now:
            source = self.algorithm.old_source if self.fresh_weights is None else "recompute"
            by_behaviour = self.lessons.on and self.lessons.ratio == "behaviour"
            return "recompute" if source == "detach" and by_behaviour else source
        return "behaviour" if self.replay.weights == "none" else "recompute"

    def plan(self) -> str:
        """What `--dry-run` says of a step."""
        o = self.algorithm
        answers, updates = self.prompts * self.samples, o.epochs * o.minibatches
        tokens = answers * self.sampling.max_new_tokens
        lines = [
            f"one step: {self.prompts} prompts x {self.samples} answers = {answers} answers of up to "
            f"{self.sampling.max_new_tokens} tokens ({tokens:,} new tokens at most)",
            f"update: {o.epochs} passes x {o.minibatches} mini-batches = {updates} optimiser steps, about "
            f"{math.ceil(answers / o.minibatches)} answers each, in micro-batches of up to {self.optim.token_budget:,} tokens",
            ranks_line(self.prompts, "prompts"),
            logits_line(self.model, self.optim.token_budget),
            memory_line(self, reference=bool(o.kl_coef), critic=o.critic == "separate", sampler=self.sampled_now),
            f"old log-probs: {self.old_source}; reference: {o.reference_line}; critic: {o.critic}",
            passes_line(self.epochs, self.prompts)
            if self.epochs is not None
            else f"in all: {self.steps} steps, {self.steps * answers:,} answers, {self.steps * updates:,} optimiser steps",
        ]
        if o.resample:
            lines.append(
                f"groups whose answers all score the same are replaced: up to {o.resample} rounds of sampling per step, at "
                f"most {self.prompts * o.resample} prompts"
            )
        if o.name == "remax":
            lines.append(f"beside them {self.prompts} greedy answers, one per prompt, which are scored but not trained")
        lines += [line for line in (self.weights_line, self.ahead_line, self._replay_line, self._lessons_line) if line]
        if updates > 1:
            lines.append("after the first optimiser step of a rollout the policy is ahead of the one that sampled")
        return "\n".join(lines)

    @property
    def weights_line(self) -> str | None:
        """That answers are weighed because nobody said otherwise, and why; None if they are not."""
        if self.fresh_weights is None or self.replay.weigh_fresh is not None or not self.sampled_now or self.ahead:
            return None
        return f"{self._unlike}: answers are weighed by the ratio of the two, at most 3 (replay.weigh_fresh false turns this off)"

    @property
    def ahead_line(self) -> str | None:
        """By which weights steps are sampled, and what corrects for it; None if by those of the moment."""
        if not self.ahead:
            return None
        how = self.fresh_weights
        if how is not None:
            by = f"{how.weights_level} weights within {how.weights_low:g} .. {how.weights_high:g} ({how.weights})"
        elif self.old_source == "behaviour":
            by = "the ratio to the policy that sampled, which the loss clips"
        else:
            by = "nothing, since replay.weigh_fresh and algorithm.old_logprobs say so: the gradient is biased"
        if self.inflight:
            what = f"weights change while answers grow, at most {self.ahead} versions old: not exact"
        else:
            what = f"step s is sampled by version s - {self.ahead} beside training"
        return f"asynchronous: {what}; corrected by {by}"

    @property
    def _lessons_line(self) -> str | None:
        o = self.lessons
        if not o.on:
            return None
        return (
            f"lessons: {round(o.share * self.samples)} of {self.samples} episodes of a group read up to {o.top}, from {o.size} "
            f"held, distilled by {o.by}; the ratio of their samples is to the {o.ratio} log-probs"
        )

    @property
    def _replay_line(self) -> str | None:
        o = self.replay
        if self.from_run is not None:
            return f"answers: those that {self.from_run} stored, in their order; nothing is sampled and no reward is called"
        if not o.on:
            return None
        groups = round(self.prompts * o.share / (1 - o.share))
        flat = ", and one for every flat group" if o.replace_flat else ""
        return (
            f"replay: {groups} groups beside {self.prompts} fresh ones{flat} ({o.mode}, {o.sampler}), each at most "
            f"{o.max_staleness} versions old and used {o.max_uses} times, from {o.size} held"
        )
