"""Runs in environments, through the jobs and the command line."""

import json
import shutil
from pathlib import Path

import letters_env
import pytest

import rolecall
from rolecall.errors import UserError
from rolecall.experience.store import read_rollouts
from rolecall.experience.stored import RolloutStore
from rolecall.jobs import rescore as rescoring
from rolecall.jobs import rl as training
from rolecall.jobs.data import demonstrated
from rolecall.maths.roles import Role, Verdict
from rolecall.policy.load import load
from rolecall.policy.token_text import token_texts
from rolecall.recipes.rendering import rendered_rows
from rolecall.rewards.records import Scored
from rolecall.tasks.env import Step
from rolecall.types import Finish

FILE = Path(letters_env.__file__)
SHORT = {
    "steps": 2,
    "prompts": 2,
    "samples": 3,
    "sampling.max_new_tokens": 5,
    "optim.lr": 1e-3,
    "agent.workers": 1,
    "quiet": True,
}
SPREAD = {"algorithm.entropy_coef": 0.01}
"""Trains where an untrained model's answers all score the same."""


def even(completions, **kwargs):
    """Of the messages behind the prompt: those of the policy and of the environment."""
    return [float(len([m for m in messages if m["role"] == "user"])) for messages in completions]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("agents") / "run"
    return rolecall.rl(
        env=f"{FILE}:Letters",
        reward=even,
        reward_weights=(0.125,),
        out=str(out),
        **SHORT,
        **{"eval.every": 2, "eval.rows": 2, "eval.samples": 2, "agent.when_full": "cut", "agent.context_tokens": 75},
    )


def test_a_run_in_an_environment_learns_and_evaluates(finished):
    assert finished.outcome.exit_code == 0
    line = finished.metrics[1]
    assert line["grad_norm"] > 0
    assert line["weights_moved"] == 1
    assert line["engine_in_sync"] == 1
    assert 2 <= line["agents/turns"] <= 3
    assert line["agents/finish/environment"] == 1
    assert line["agents/samples"] > 1, "contexts were cut"
    total = line["rewards/env/mean"] + 0.125 * line["rewards/even/mean"]
    assert line["reward"] == pytest.approx(total, rel=1e-5)
    assert {"eval_reward", "eval_mean_turns", "eval_avg@2", "eval_pass@2"} <= finished.evaluations[0].keys()


def test_the_record_of_a_run_says_who_wrote_what(finished):
    rollouts = read_rollouts(finished.path / "rollouts" / "step-000001.parquet")
    tokenizer = load("tiny").tokenizer
    for t, verdicts in zip(rollouts.trajectories, rollouts.batch.verdicts, strict=True):
        assert t.authors is not None
        for start, end, who in t.authors:
            roles = set(t.roles[start:end])
            assert roles <= {Role.CONTENT, Role.STOP} if who == "policy" else not roles & {Role.CONTENT, Role.STOP}
            trained = (verdicts[start:end] == Verdict.TRAINED).all() if who == "policy" else False
            assert bool((verdicts[start:end] == Verdict.TRAINED).any()) == bool(trained)
            if who == "user":
                assert "".join(token_texts(tokenizer, t.ids[start:end])) == "more"
    assert {who for t in rollouts.trajectories for _, _, who in t.authors} >= {"prompt", "policy", "template", "user"}
    assert any("user: more" in d.answer_text for d in rollouts.details)
    keys = [(t.group, t.episode) for t in rollouts.trajectories]
    assert len(set(keys)) == 6
    assert len(keys) > 6, "an episode has a row for each of its samples"


def test_eval_plays_the_environment_that_a_run_was_made_in(finished):
    found = rolecall.eval(
        model=str(finished.path), reward=even, n=2, **{"sampling.max_new_tokens": 5, "agent.workers": 1}
    )
    assert found.numbers["mean_turns"] >= 2
    assert found.answers[0].startswith("assistant:")


class Length:
    """A reward in this process: how many letters the policy said, and 100 for each message behind the prompt."""

    names = ("length",)

    def __init__(self):
        self.samples = []

    def score(self, samples, *, state=None):
        self.samples += samples
        said = ["".join(m["content"] for m in s.completion if m["role"] == "assistant") for s in samples]
        totals = [float(len(text) + 100 * len(s.completion)) for text, s in zip(said, samples, strict=True)]
        return [Scored(scores={"length": total}, total=total) for total in totals]

    def take_metrics(self):
        return {}


class Bytes(Length):
    """Of the bytes that were said, so that no two answers score the same."""

    def score(self, samples, *, state=None):
        return [
            Scored(scores={"length": total}, total=total) for total in (float(sum(s.completion_ids)) for s in samples)
        ]


@pytest.fixture
def length(monkeypatch):
    """Takes the place of the reward that `rescore` is given."""
    reward = Length()
    monkeypatch.setattr(rescoring, "open_reward", lambda *args, **kwargs: reward)
    return reward


def test_another_reward_sees_whole_episodes_and_the_environments_part_stays(finished, length, tmp_path):
    found = rolecall.rescore(finished.path, reward=even, out=str(tmp_path / "told"), quiet=True)
    whole = 0
    for old, new in zip(RolloutStore(finished.path), RolloutStore(found.path), strict=True):
        totals: dict[tuple, set] = {}
        for was, t, now in zip(old.trajectories, new.trajectories, new.details, strict=True):
            said = "".join(m["content"] for m in now.messages if m["role"] == "assistant")
            assert t.scores == {"env": was.scores["env"], "length": len(said) + 100 * (len(now.messages) - 1)}
            assert now.total == sum(t.scores.values())
            totals.setdefault((t.group, t.episode), set()).add(now.total)
        assert all(len(known) == 1 for known in totals.values()), "the samples of an episode share one score"
        assert len(totals) < len(new.trajectories), "contexts were cut"
        whole += len(totals)
    assert len(length.samples) == whole, "an episode is asked about once, however many samples it has"
    assert (found.answers, found.failed) == (whole, 0)
    for sample in length.samples:
        assert sample.prompt == ({"role": "user", "content": sample.prompt[0]["content"]},)
        assert sample.completion[0]["role"] == "assistant"
        assert sample.row.keys() == {"seed"}
    written = [
        list(t.ids[a:b]) for rollouts in RolloutStore(found.path) for t in rollouts.trajectories for a, b in t.turns
    ]
    assert [i for sample in length.samples for i in sample.completion_ids] == [i for turn in written for i in turn]


def test_stored_episodes_are_trained_on_and_count_once(finished, length, tmp_path):
    told = rolecall.rescore(finished.path, reward=even, out=str(tmp_path / "told"), quiet=True)
    settings = {name: value for name, value in SHORT.items() if not name.startswith("agent")}
    run = rolecall.rl(from_run=str(told.path), out=str(tmp_path / "run"), **settings)
    first = RolloutStore(told.path).read(0)
    whole = {(t.group, t.episode): d.total for t, d in zip(first.trajectories, first.details, strict=True)}
    assert run.metrics[0]["reward"] == pytest.approx(sum(whole.values()) / len(whole), rel=1e-5)
    assert run.metrics[0]["policy/ratio"] == pytest.approx(1, abs=1e-3), "it starts from the weights that sampled"
    assert all(line["weights_moved"] for line in run.metrics)


def test_an_episode_whose_messages_were_not_kept_is_refused(tmp_path, length):
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    held = Path(__file__).parents[1] / "experience" / "data" / "rollouts-v2.parquet"
    shutil.copy(held, tmp_path / "run" / "rollouts" / "step-000001.parquet")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"env": "guessing:high=3,tries=2"}))
    with pytest.raises(UserError, match="whose messages were not kept yet when it was written"):
        rolecall.rescore(tmp_path / "run", reward=even, quiet=True)


def test_the_rows_of_a_built_in_environment_are_compared_with_what_was_asked(tmp_path, length):
    rolecall.rl(env="calculator", out=str(tmp_path / "run"), **{**SHORT, **SPREAD, "steps": 1})
    with pytest.raises(UserError, match="give the run's own rows with --rows"):
        rolecall.rescore(tmp_path / "run", reward=even, rows="calculator:digits=3", quiet=True)
    assert rolecall.rescore(tmp_path / "run", reward=even, quiet=True).answers == 6
    asked = [(s.prompt[0]["content"], s.row["answer"]) for s in length.samples]
    assert all(str(int(a) * int(b)) == answer for (a, b), answer in ((p.split("*"), answer) for p, answer in asked))


def test_a_class_given_in_python_is_asked_for_again_on_resume(tmp_path):
    class Once:
        def reset(self, row, seed):
            return "go"

        def step(self, message):
            return Step(reward=float(sum(message["content"].encode()) % 3), done=True)

    rolecall.rl(env=Once, out=str(tmp_path / "run"), **{**SHORT, "steps": 1})
    assert json.loads((tmp_path / "run" / "config.json").read_text())["env"] == "(given in Python) Once"
    with pytest.raises(UserError, match="environment came from Python"):
        rolecall.rl(out=str(tmp_path / "run"), resume=True, quiet=True)
    more = rolecall.rl(env=Once, out=str(tmp_path / "run"), resume=True, extend=1, quiet=True)
    assert [line["step"] for line in more.metrics] == [1, 2]


def test_a_broken_episode_is_counted_and_does_not_train(tmp_path, caplog, length):
    class Moody:
        def reset(self, row, seed):
            self.turn = 0
            return "go"

        def step(self, message):
            self.turn += 1
            if self.turn == 2 and message["content"][:1] < "m":
                raise RuntimeError("bad mood")
            return Step(messages="on", reward=float(len(message["content"]) % 3), done=self.turn == 3)

    run = rolecall.rl(env=Moody, out=str(tmp_path / "run"), **{**SHORT, "steps": 1, "prompts": 3, "samples": 4})
    line = run.metrics[0]
    share = line["agents/finish/abort"]
    assert 0 < share < 1
    assert line["rewards/failed"] == pytest.approx(share)
    assert "was broken off: RuntimeError: bad mood" in caplog.text
    rollouts = read_rollouts(run.path / "rollouts" / "step-000001.parquet")
    for t, verdicts in zip(rollouts.trajectories, rollouts.batch.verdicts, strict=True):
        assert bool((verdicts == Verdict.TRAINED).any()) == (t.finish is not Finish.ABORT)
    assert line["untrained_tokens/bad_record"] > 0
    told = rolecall.rescore(run.path, reward=even, quiet=True)
    details = RolloutStore(told.path).read(0).details
    assert [d.total is None for d in details] == [t.finish is Finish.ABORT for t in rollouts.trajectories]
    assert [d.reward_failure for d in details] == [d.reward_failure for d in rollouts.details]
    assert told.failed == share * 12


def test_a_run_whose_episodes_all_break_in_reset_ends_with_the_reason(tmp_path):
    class Never:
        def reset(self, row, seed):
            return "go" if seed == 0 else None

        def step(self, message):
            return Step(done=True)

    with pytest.raises(
        UserError, match=r"all 6 episodes of step 1 were broken off before the first turn: Never\.reset returned a"
    ):
        rolecall.rl(env=Never, out=str(tmp_path / "run"), **SHORT)


def test_both_sides_of_self_play_are_in_one_group(tmp_path):
    run = rolecall.rl(
        env="kuhn", out=str(tmp_path / "run"), **{**SHORT, **SPREAD, "steps": 1, "algorithm.scale": "none"}
    )
    rollouts = read_rollouts(run.path / "rollouts" / "step-000001.parquet")
    assert {t.agent for t in rollouts.trajectories} <= {"first", "second"}
    for t in rollouts.trajectories:
        assert {who for _, _, who in t.authors} <= {"prompt", "policy", "template", "first", "second"} - {t.agent}
    assert run.metrics[0]["agents/reward/first"] == -2, "an untrained model says nothing legal"


def test_rows_of_a_task_bring_their_environment(tmp_path):
    run = rolecall.rl(rows="guessing:high=3,tries=2", out=str(tmp_path / "run"), **{**SHORT, **SPREAD, "steps": 1})
    assert run.metrics[0]["agents/turns"] == 2


@pytest.mark.parametrize(
    ("env", "rows"),
    [
        ("gym:FrozenLake-v1:is_slippery=false", None),
        ("rg:chain_sum", None),
        (f"{FILE}:Counter", [{"prompt": "Play.", "goal": goal} for goal in (2, 3)]),
    ],
)
@pytest.mark.filterwarnings("ignore:the rows or the environment bring tools")  # the built-in template has none
def test_environments_of_others_are_trained_in(env, rows, tmp_path, monkeypatch):
    """Gymnasium's, reasoning-gym's as one turn, and a class of TRL's kind; an untrained model earns nothing in them."""
    monkeypatch.setattr(training, "open_training_reward", lambda *args, **kwargs: Bytes())
    short = {**SHORT, "steps": 1, "agent.max_turns": 3}
    run = rolecall.rl(env=env, rows=rows, reward=even, out=str(tmp_path / "run"), **short)
    (line,) = run.metrics
    assert line["agents/turns"] == (3 if env.startswith("gym") else 1), "what is no action is asked for again"
    assert line["agents/finish/max_turns" if env.startswith("gym") else "agents/finish/environment"] == 1
    assert line["rewards/failed"] == 0
    assert line["weights_moved"] == 1


@pytest.mark.parametrize("name", ["calculator", "guessing", "kuhn"])
def test_demonstrations_of_several_turns_train_every_answer(name):
    policy = load("tiny")
    rows = demonstrated(name, seed=0)
    from rolecall.config.parts import ChatOptions
    from rolecall.tasks.rows import ListRows

    some = ListRows([rows[i] for i in range(8)])
    trajectories, too_long = rendered_rows(some, policy, ChatOptions(), max_length=512)
    assert not too_long
    for row, t in zip(some, trajectories, strict=True):
        answers = [m["content"] for m in row["completion"] if m["role"] == "assistant"]
        said = [policy.tokenizer.decode(t.ids[start : end - 1]) for start, end in t.turns]
        assert said == answers
        assert all(t.roles[end - 1] == Role.STOP for _, end in t.turns)


def test_sft_evaluates_a_task_of_several_turns_by_playing(tmp_path):
    run = rolecall.sft(
        rows="guessing:high=3,tries=2",
        steps=1,
        out=str(tmp_path / "run"),
        quiet=True,
        **{"eval.every": 1, "eval.rows": 3},
    )
    assert run.evaluations[-1]["eval_mean_turns"] == 2


def test_play_shows_an_episode_token_by_token(capsys):
    from rolecall.cli import main

    command = ["play", "--model", "tiny", "--env", "guessing", "--show", "tokens", "--sampling.max_new_tokens", "3"]
    assert main(command) in (0, None)
    shown = capsys.readouterr().out
    assert "author      role" in shown
    assert " policy      content" in shown
    assert " user        observation" in shown
    assert "--- episode 0, agent: environment, 3 turns, reward 0" in shown
    main([*command[:5], "--json", "--sampling.max_new_tokens", "3"])
    row = json.loads(capsys.readouterr().out)
    assert len(row["samples"][0]["authors"]) == len(row["samples"][0]["ids"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"env": "calculater"}, "did you mean 'calculator'"),
        ({"env": ""}, "the environment's name is empty"),
        ({"env": "guessing", "agent.context_tokens": 5000}, "the model's context is 1024"),
        ({"env": "guessing", "algorithm.overlong_buffer": 2}, "agent.max_tokens"),
        ({"env": "guessing", "algorithm.resample": 2}, "not drawn again"),
        ({"env": "guessing", "replay.share": 0.5, "replay.answers": 2}, "episodes are replayed whole"),
        ({"env": "guessing", "agent.max_turns": 0}, "agent.max_turns must be at least 1, got 0"),
        ({"env": "guessing", "agent.max_token": 3}, "max_tokens"),
    ],
)
def test_wrong_settings_are_a_sentence_before_any_work(tmp_path, settings, said):
    with pytest.raises(UserError, match=said):
        rolecall.rl(out=str(tmp_path / "run"), **{**SHORT, **settings})
    assert not (tmp_path / "run").exists()
