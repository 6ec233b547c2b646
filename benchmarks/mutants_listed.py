"""Mistakes in the wiring that were once made or nearly made: each is put into a copy of src, and a test must fail.

    python benchmarks/mutants_listed.py            all of them; writes the table in docs/numerics.md
    python benchmarks/mutants_listed.py target kl  those whose names hold one of the words

Torch and its like are imported once; every mutant runs in a fork, in which rolecall is imported from the copy.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "numerics.md"
BEGIN, END = "<!-- mutants-listed: begin -->", "<!-- mutants-listed: end -->"
HEAVY = ("torch", "transformers", "accelerate", "pyarrow.parquet", "gymnasium")

REFERENCE = "reference/test_reference_language.py"
AGENTS = "reference/test_reference_agents.py"
LEARNER = "marl/test_marl_learner.py"


class Mutant(NamedTuple):
    """One change of the text of a file in src/rolecall, and the tests that are run against it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Under tests/, as pytest names them."""


MUTANTS = [
    # -- marl
    Mutant(
        "the target network never follows softly",
        "recipes/marl.py",
        "follow(*self._pair, share=o.tau)",
        "pass",
        (f"{LEARNER}::test_the_target_follows_softly_in_every_optimiser_step", f"{AGENTS}::test_steps_of_qmix"),
    ),
    Mutant(
        "the target network is never copied",
        "recipes/marl.py",
        "follow(*self._pair, share=1.0)",
        "pass",
        (f"{LEARNER}::test_the_target_is_copied_every_so_many_optimiser_steps", f"{AGENTS}::test_steps_of_qmix"),
    ),
    Mutant(
        "the target mixer is the live one",
        "marl/q_learning.py",
        "_mixed(target.mixer, future,",
        "_mixed(live.mixer, future,",
        (f"{LEARNER}::test_targets_are_mixed_by_the_target_mixer", f"{AGENTS}::test_steps_of_qmix"),
    ),
    Mutant(
        "under double Q the best next action may be unavailable",
        "marl/q_learning.py",
        "available(scores if double else theirs, batch.avail_actions).argmax",
        "(scores if double else available(theirs, batch.avail_actions)).argmax",
        (f"{LEARNER}::test_the_best_next_action_is_an_available_one", f"{AGENTS}::test_steps_of_qmix"),
    ),
    Mutant(
        "the learner never passes importance weights",
        "recipes/marl.py",
        "weights=drawn.weights if o.alpha else None",
        "weights=None",
        (f"{LEARNER}::test_drawn_episodes_are_weighed_and_get_their_errors_as_priorities",),
    ),
    Mutant(
        "the learner never sets priorities",
        "recipes/marl.py",
        "self.buffer.set_priorities(drawn.index, found.errors)",
        "pass",
        (f"{LEARNER}::test_drawn_episodes_are_weighed_and_get_their_errors_as_priorities",),
    ),
    Mutant(
        "recurrent memory is carried into the next episode",
        "marl/acting.py",
        "self._memory = self._last = None",
        "self._last = None",
        (f"{LEARNER}::test_nothing_is_remembered_of_the_episodes_before",),
    ),
    Mutant(
        "reward scaling of agents shifts the mean",
        "recipes/marl.py",
        "rewards / self.moments.std.float()",
        "(rewards - self.moments.mean.float()) / self.moments.std.float()",
        (f"{LEARNER}::test_rewards_are_scaled_without_a_shift", f"{AGENTS}::test_steps_of_qmix"),
    ),
    Mutant(
        "the old log-probs of later passes follow the policy",
        "recipes/marl.py",
        "if steps.old_logprobs is None:",
        "if True:",
        (f"{LEARNER}::test_every_pass_has_the_ratio_to_the_policy_that_played", f"{AGENTS}::test_steps_of_mappo"),
    ),
    Mutant(
        "evaluation of agents uses training's random numbers",
        "recipes/marl.py",
        "run(actor, phase=EVALUATE, step=0)",
        "run(actor, phase=TRAIN, step=0)",
        (f"{LEARNER}::test_evaluation_plays_other_episodes_than_training_and_the_same_every_time",),
    ),
    # -- recipes/algorithms
    Mutant(
        "PPO whitens advantages over eligible positions",
        "recipes/algorithms.py",
        "return whiten(raw, trained(batch), coefficients), returns",
        "return whiten(raw, walked, coefficients), returns",
        (f"{REFERENCE}::test_a_step_of_ppo_with_tokens_blacked_out_and_rewards_whitened",),
    ),
    Mutant(
        "GAE walks trained positions",
        "recipes/algorithms.py",
        "rewards, required(batch.values), walked, gamma",
        "rewards, required(batch.values), trained(batch), gamma",
        (f"{REFERENCE}::test_a_step_of_ppo_with_tokens_blacked_out_and_rewards_whitened",),
    ),
    Mutant(
        "whitening of rewards shifts the mean",
        "recipes/algorithms.py",
        "masked_whiten(rewards, walked, shift_mean=False, moments=measured)",
        "masked_whiten(rewards, walked, shift_mean=True, moments=measured)",
        (f"{REFERENCE}::test_a_step_of_ppo_with_tokens_blacked_out_and_rewards_whitened",),
    ),
    Mutant(
        "the KL in the loss has no straight-through gradient",
        "recipes/algorithms.py",
        "straight_through=True",
        "straight_through=False",
        ("recipes/test_kl_places.py::test_in_the_loss_every_kind_has_the_gradient_of_the_kl_at_each_token",),
    ),
    # -- recipes
    Mutant(
        "the KL is estimated with policy and reference swapped",
        "recipes/prepare.py",
        "kl_estimate(now, batch.ref_logprobs,",
        "kl_estimate(batch.ref_logprobs, now,",
        (f"{REFERENCE}::test_a_step_of_ppo_with_the_kl_in_the_reward",),
    ),
    Mutant(
        "the KL controller is fed the KL per token",
        "recipes/rl.py",
        "self.kl.update(kl_sum / answers,",
        "self.kl.update(kl_sum / float(self.rule.eligible(rollout.batch.roles).sum()),",
        (f"{REFERENCE}::test_a_step_of_grpo_with_the_kl_in_the_loss_and_several_optimiser_steps",),
    ),
    Mutant(
        "greedy evaluation samples",
        "recipes/evaluate.py",
        "self._answers(replace(self.sampling, temperature=0.0), 1)",
        "self._answers(self.sampling, 1)",
        ("recipes/test_evaluate.py::test_answers_are_the_likeliest_whatever_training_samples_with",),
    ),
    Mutant(
        "greedy evaluation of episodes samples",
        "agents/episodes.py",
        "self._play(replace(self.sampling, temperature=0.0), 1)",
        "self._play(self.sampling, 1)",
        ("recipes/test_ranks_apart.py",),
    ),
    Mutant(
        "evaluation asks a task's training rows",
        "jobs/data.py",
        'held.rows("test", n=evaluation.rows)',
        'held.rows("train", n=evaluation.rows)',
        ("jobs/test_rows.py::test_a_task_is_evaluated_on_its_test_rows",),
    ),
    Mutant(
        "evaluation plays a task's training rows",
        "jobs/agents.py",
        'task.rows("test", n=evaluation.rows)',
        'task.rows("train", n=evaluation.rows)',
        ("jobs/test_rows.py::test_episodes_of_a_task_are_evaluated_on_its_test_rows",),
    ),
    Mutant(
        "preferences are evaluated on a task's training rows",
        "jobs/data.py",
        'preference_rows(task, "test", n=evaluation.rows, seed=options.seed)',
        'preference_rows(task, "train", n=evaluation.rows, seed=options.seed)',
        ("jobs/test_rows.py::test_preferences_of_a_task_are_evaluated_on_its_test_rows",),
    ),
    Mutant(
        "ranks ask the same prompts",
        "recipes/collect.py",
        "self.ranks.share(self.order.take(prompts))",
        "self.order.take(prompts)[:: self.ranks.count]",
        ("recipes/test_ranks_apart.py",),
    ),
    Mutant(
        "ranks that replace flat groups ask the same prompts",
        "recipes/collect.py",
        "sum(needs[: self.ranks.number]), sum(needs)",
        "0, sum(needs)",
        ("recipes/test_ranks_apart.py",),
    ),
    Mutant(
        "ranks sample with the same random numbers",
        "recipes/collect.py",
        "dict(zip(self.ranks.share(range(prompts)),",
        "dict(zip(range(prompts),",
        ("recipes/test_ranks_apart.py",),
    ),
    # -- experience
    Mutant(
        "a group is replayed one version less than its limit allows",
        "experience/replay.py",
        "version - g.version <= self.limits.max_staleness",
        "version - g.version < self.limits.max_staleness",
        ("experience/test_replay_buffer.py::test_a_group_is_used_up_to_its_limit_of_age_and_not_beyond",),
    ),
    Mutant(
        "a group is replayed one version more than its limit allows",
        "experience/replay.py",
        "version - g.version <= self.limits.max_staleness",
        "version - g.version <= self.limits.max_staleness + 1",
        ("experience/test_replay_buffer.py::test_a_group_is_used_up_to_its_limit_of_age_and_not_beyond",),
    ),
    # -- rollout
    Mutant(
        "the native engine shares the trainer's memory",
        "rollout/llama.py",
        "whole(weight.detach()).to(self.dtype, copy=True)",
        "whole(weight.detach()).to(self.dtype)",
        ("rollout/test_native.py::test_what_is_loaded_is_a_copy",),
    ),
    Mutant(
        "the hf engine shares the trainer's memory",
        "rollout/hf.py",
        "cast_weights(copy.deepcopy(model), self.dtype)",
        "cast_weights(model, self.dtype)",
        ("rollout/test_hf.py::test_what_is_loaded_is_a_copy",),
    ),
    Mutant(
        "the rotary scale is ignored",
        "rollout/llama.py",
        "self._rotary_scale: float = rotary.attention_scaling",
        "self._rotary_scale: float = 1.0",
        ("rollout/test_parity.py::test_logprobs_are_the_trainers_in_fp32",),
    ),
    Mutant(
        "two players of an episode share random numbers",
        "agents/play.py",
        "side.cuts * len(players) + players.index(episode.speaker)",
        "side.cuts * len(players)",
        (f"{REFERENCE}::test_a_step_of_two_players_of_one_policy",),
    ),
    # -- train
    Mutant(
        "vectors decay too",
        "train/optim.py",
        "options.weight_decay if matrix else 0.0",
        "options.weight_decay",
        ("train/test_optim.py",),
    ),
    Mutant(
        "critic_lr is ignored",
        "train/optim.py",
        "options.critic_lr if critic and options.critic_lr is not None else options.lr",
        "options.lr",
        ("train/test_optim.py",),
    ),
    # -- policy
    Mutant(
        "logit_scale of the model is ignored",
        "policy/model.py",
        "logit_scale=after.scale",
        "logit_scale=1.0",
        ("recipes/test_families.py::test_scales_and_caps_of_logits_are_the_models_own",),
    ),
    Mutant(
        "the head's gradient in another dtype is overwritten by the last chunk",
        "policy/logprobs.py",
        "weight += words.T @ source",
        "weight.copy_(words.T @ source)",
        ("policy/test_head_chunks.py",),
    ),
    Mutant(
        "the gradient of the rows that fill a chunk is not zeroed",
        "policy/head_ops.py",
        "whole[len(raw) :] = 0",
        "pass",
        ("policy/test_head_chunks.py",),
    ),
]


def source(mutant: Mutant, src: Path) -> tuple[Path, str]:
    """The file to change and its text, in which the old text stands exactly once."""
    path = src / "rolecall" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(
            f"{mutant.name}: {mutant.old!r} occurs {text.count(mutant.old)} times in {mutant.file}, not once; "
            "find where that is decided now and change the entry"
        )
    return path, text


class _Watcher:
    """A pytest plugin: what ran, and what failed first."""

    def __init__(self) -> None:
        self.ran, self.failed = 0, None

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.ran += report.when == "call"
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            self.failed = f"{report.nodeid} (could not be imported)"


def run(tests: tuple[str, ...], src: Path) -> dict[str, Any]:
    """Run tests against the package in `src`, in a process of their own."""
    receive, send = os.pipe()
    child = os.fork()
    if child:
        os.close(send)
        with os.fdopen(receive) as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        return json.loads(told or '{"ran": 0, "failed": "the process died"}')
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    sys.path.insert(0, str(src))
    os.environ["PYTHONPATH"] = str(src)  # for the processes that tests start
    import pytest

    watcher = _Watcher()
    imported = "ignore::pytest.PytestAssertRewriteWarning"  # some of HEAVY are plugins of pytest too
    where = [f"{ROOT}/tests/{test}" for test in tests]
    pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", imported, *where], [watcher])
    import rolecall

    found = {"ran": watcher.ran, "failed": watcher.failed, "package": rolecall.__file__}
    os.write(send, json.dumps(found).encode())
    os._exit(0)


def survivors(mutants: list[Mutant]) -> tuple[dict[str, str], list[str]]:
    """The first test that fails, by mutant; and the mutants that no test notices."""
    noticed, missed = {}, []
    with tempfile.TemporaryDirectory() as temporary:
        src = Path(temporary) / "src"
        shutil.copytree(ROOT / "src", src, ignore=shutil.ignore_patterns("__pycache__"))
        whole = run(tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests)), src)
        if whole["failed"] or not whole["ran"] or not whole["package"].startswith(str(src)):
            raise SystemExit(f"without any change the tests must pass, and against the copy in {src}: {whole}")
        for mutant in mutants:
            path, text = source(mutant, src)
            began = time.monotonic()
            path.write_text(text.replace(mutant.old, mutant.new))
            found = run(mutant.tests, src)
            path.write_text(text)
            print(f"{time.monotonic() - began:5.1f} s  {mutant.name}: {found['failed'] or 'NOT NOTICED'}", flush=True)
            if found["failed"]:
                noticed[mutant.name] = found["failed"]
            else:
                missed.append(mutant.name)
    return noticed, missed


def table(noticed: dict[str, str]) -> str:
    """The page's part."""
    lines = ["| mutant | where | what fails first |", "|---|---|---|"]
    for mutant in MUTANTS:
        file, _, test = noticed[mutant.name].removeprefix("tests/").partition("::")
        lines.append(f"| {mutant.name} | `{mutant.file}` | `{file}`: `{test}` |")
    return "\n".join(lines)


def main() -> None:
    words = sys.argv[1:]
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    for mutant in chosen:
        source(mutant, ROOT / "src")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.chdir(ROOT)
    for name in HEAVY:
        __import__(name)
    noticed, missed = survivors(chosen)
    print(f"{len(noticed)} of {len(chosen)} noticed")
    if missed:
        raise SystemExit("not noticed: " + "; ".join(missed))
    if chosen == MUTANTS:
        before, rest = PAGE.read_text().split(BEGIN)
        after = rest.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{table(noticed)}\n{END}{after}")


if __name__ == "__main__":
    main()
