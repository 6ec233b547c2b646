"""Episodes: who wrote which token, what a limit does, where a context is cut, what the engine remembers."""

import math
from random import Random

import pytest
import torch
from agent_envs import Counting, Dawdling, Echo, Endless, Wordy
from talking import DIALECT, TOKENIZER, encode, play, player, spoken, talker

from rolecall.agents.played import Wanted
from rolecall.agents.pool import EnvPool, LocalEnvs
from rolecall.maths.roles import Role
from rolecall.policy.load import load
from rolecall.rollout.native import NativeEngine
from rolecall.tasks.agent_tasks import Calculator
from rolecall.tasks.env import Step
from rolecall.types import Finish, Sampling

HEAD = "<|im_start|>assistant\n"


def only(episode, who="agent"):
    (trajectory,) = episode.trajectories(group=0)[who]
    return trajectory


# -- roles by author ----------------------------------------------------------------------------------------------


def test_only_what_the_policy_wrote_is_content_or_stop():
    (episode,) = play(Calculator().env, talker("<calc>6*7</calc>", "42"), [{"prompt": "6*7?", "answer": "42"}])
    assert spoken(only(episode)) == [
        ("prompt", "P", f"<|im_start|>user\n6*7?<|im_end|>\n{HEAD}"),
        ("policy", "CS", "<calc>6*7</calc><|im_end|>"),
        ("template", "P", "\n<|im_start|>tool\n"),
        ("tool", "O", "42"),
        ("template", "P", f"<|im_end|>\n{HEAD}"),
        ("policy", "CS", "42<|im_end|>"),
    ]
    assert (episode.finish, episode.rewards) == (Finish.ENVIRONMENT, {"agent": 1.0})
    trajectory = only(episode)
    chosen = [role in (Role.CONTENT, Role.STOP) for role in trajectory.roles]
    assert chosen == list(trajectory.sampled), "a log-prob exactly where the policy chose"
    assert trajectory.turns == tuple((s, e) for s, e, who in trajectory.authors if who == "policy")


def test_a_memory_a_user_and_a_tool_that_speak_together_are_each_named():
    class Crowd(Echo):
        rounds = 2

        def step(self, message):
            said = [
                {"role": "user", "content": "note", "author": "memory"},
                {"role": "user", "content": "hi"},
                {"role": "tool", "content": "42"},
            ]
            return Step(messages=said, done=bool(self.heard.append(1) or len(self.heard) > 1))

    (episode,) = play(Crowd, talker("a", "b"), [{"prompt": "go"}])
    heard = [(who, roles, text) for who, roles, text in spoken(only(episode)) if "O" in roles]
    assert heard == [("memory", "O", "note"), ("user", "O", "hi"), ("tool", "O", "42")]


def test_an_answer_that_was_cut_off_is_closed_by_the_template_and_the_close_does_not_train():
    (episode,) = play(Echo, talker("abcdefgh", stop=False), [{"prompt": "go"}], new_tokens=3)
    runs = spoken(only(episode))
    assert runs[1:3] == [("policy", "C", "abc"), ("template", "P", "<|im_end|>\n<|im_start|>tool\n")]
    assert episode.counts["cut_turns"] == 3


def test_what_looks_like_a_stop_token_in_a_tools_output_is_an_observation():
    class Sly(Echo):
        def step(self, message):
            super().step(message)
            return Step(messages=[{"role": "tool", "content": "x<|im_end|>y"}], done=len(self.heard) == 2)

    (episode,) = play(Sly, talker("a"), [{"prompt": "go"}])
    trajectory = only(episode)
    assert [r for r in trajectory.roles if r == Role.STOP] == [Role.STOP] * 2, "one for each of the policy's turns"
    assert ("tool", "O", "x<|im_end|>y") in spoken(trajectory)


def test_each_side_of_a_game_trains_on_its_own_words_and_observes_the_others():
    (episode,) = play(Counting, talker("one", "two"))
    first, second = only(episode, "a"), only(episode, "b")
    assert [(who, text) for who, roles, text in spoken(first) if roles != "P"] == [
        ("policy", "one<|im_end|>"), ("b", "one"), ("policy", "two<|im_end|>")]  # fmt: skip
    assert [(who, roles) for who, roles, _ in spoken(second)] == [
        ("prompt", "P"), ("a", "O"), ("template", "P"), ("policy", "CS")]  # fmt: skip
    assert episode.rewards == {"a": 1.0, "b": -1.0}
    assert (first.agent, second.agent, first.episode, second.episode) == ("a", "b", 0, 0)


def test_a_system_prompt_comes_first_and_is_given():
    from dataclasses import replace

    (episode,) = play(Echo, talker("a"), [{"prompt": "go"}], dialect=replace(DIALECT, system_prompt="Be brief."))
    who, roles, text = spoken(only(episode))[0]
    assert (who, roles) == ("prompt", "P")
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")


# -- limits, each with its finish ---------------------------------------------------------------------------------


def test_an_environment_that_never_ends_is_cut_at_the_turns():
    (episode,) = play(Endless, talker("a"), max_turns=5)
    assert (episode.finish, episode.counts["turns"]) == (Finish.MAX_TURNS, 5)
    assert episode.finish.truncated
    assert episode.rewards == {"agent": 5.0}, "what was earned until then counts"


def test_the_tokens_of_an_episode_are_limited_to_the_last_one():
    (episode,) = play(Endless, talker("abcd"), max_tokens=12)
    assert episode.finish is Finish.LENGTH
    assert episode.sides["agent"].policy_tokens == 12
    assert [end - start for start, end in only(episode).turns] == [5, 5, 2], "the last turn gets what is left"


def test_a_full_context_ends_the_episode_without_a_token_too_many():
    (episode,) = play(Endless, talker("abcd"), context_tokens=120)
    assert episode.finish is Finish.LENGTH
    assert len(only(episode).ids) <= 120
    assert len(only(episode).turns) > 1


def test_time_ends_all_episodes_of_a_step():
    ticks = iter(range(100))
    (one, two) = play(Endless, talker("a"), [{}, {}], max_seconds=5, clock=lambda: float(next(ticks)))
    assert (one.finish, two.finish) == (Finish.TIMEOUT, Finish.TIMEOUT)
    assert one.counts["turns"] == two.counts["turns"] == 2


def test_an_environments_own_limit_is_a_truncation():
    class Limited(Echo):
        def step(self, message):
            return Step(messages="over", done=True, truncated=True, reward=0.5)

    (episode,) = play(Limited, talker("a"))
    assert (episode.finish, episode.rewards["agent"]) == (Finish.MAX_TURNS, 0.5)


def test_a_prompt_that_leaves_no_room_is_cut_off_before_its_first_turn():
    (episode,) = play(Echo, talker("a"), [{"prompt": "x" * 200}], context_tokens=100)
    assert (episode.finish, episode.trajectories(group=0)) == (Finish.LENGTH, {"agent": []})


def test_an_environment_may_say_what_an_episode_was_worth_that_was_cut_off():
    class Late(Endless):
        def step(self, message):
            super().step(message)
            return Step(messages="on")

        def final_reward(self):
            return float(len(self.heard))

    (episode,) = play(Late, talker("a"), max_turns=3)
    assert episode.rewards == {"agent": 3.0}
    assert episode.view["heard"] == ["a"] * 3, "reward functions see its plain attributes"


# -- cutting the context ------------------------------------------------------------------------------------------


def test_cutting_the_context_opens_a_new_sample_whose_past_is_only_read():
    (episode,) = play(Endless, talker("abcd"), max_turns=8, context_tokens=200, when_full="cut", new_tokens=8)
    samples = episode.trajectories(group=3)["agent"]
    assert len(samples) > 1
    assert episode.counts["context_cuts"] == len(samples) - 1
    assert episode.finish is Finish.MAX_TURNS
    assert {t.finish for t in samples} == {Finish.MAX_TURNS}
    assert {(t.group, t.episode, t.agent) for t in samples} == {(3, 0, "agent")}
    assert all(len(t.ids) <= 200 for t in samples)
    chosen = sum(role in (Role.CONTENT, Role.STOP) for t in samples for role in t.roles)
    assert chosen == 8 * 5, "every turn trains exactly once"
    later = spoken(samples[1])
    assert later[0][:2] == ("prompt", "P")
    assert ("history", "O", "abcd") in later
    assert later[-1] == ("policy", "CS", "abcd<|im_end|>")


@pytest.mark.parametrize("context", range(186, 208, 3))
def test_the_context_is_cut_before_an_answer_would_be_and_then_for_several_turns(context):
    how = {"max_turns": 8, "when_full": "cut", "new_tokens": 8}
    (episode,) = play(Endless, talker("abcd"), context_tokens=context, **how)
    assert "cut_turns" not in episode.counts
    assert episode.counts["context_cuts"] == 1
    assert sum(role == Role.STOP for t in episode.trajectories(group=0)["agent"] for role in t.roles) == 8


def test_an_environment_may_replace_the_context():
    class Forgetful(Echo):
        def step(self, message):
            super().step(message)
            if len(self.heard) == 1:
                start = {"role": "user", "content": "go"}
                return Step(
                    context=[start, {"role": "user", "content": "you said a", "author": "memory"}], messages="on"
                )
            return Step(done=True, reward=1.0)

    (episode,) = play(Forgetful, talker("a"), [{"prompt": "go"}])
    first, second = episode.trajectories(group=0)["agent"]
    assert [who for who, *_ in spoken(first)] == ["prompt", "policy"]
    assert [(who, roles) for who, roles, _ in spoken(second)] == [
        ("prompt", "P"), ("memory", "O"), ("template", "P"), ("user", "O"), ("template", "P"), ("policy", "CS")]  # fmt: skip


def test_a_template_that_rewrites_the_past_opens_a_new_sample():
    from dataclasses import replace

    strips = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
        "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' and not loop.last else m['content'] }}"
        "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    dialect = replace(DIALECT, template_kwargs={"chat_template": strips})
    with pytest.warns(UserWarning, match="rewrites earlier turns"):
        (episode,) = play(Echo, talker("<think>m</think>hi"), [{"prompt": "go"}], dialect=dialect)
    samples = episode.trajectories(group=0)["agent"]
    assert len(samples) == 3, "one for each turn"
    assert all(len(t.turns) == 1 for t in samples)
    assert [who for who, *_ in spoken(samples[2])] == ["prompt", "history", "policy"]


def test_samples_after_a_cut_do_not_draw_the_same_numbers_again():
    asked = []
    engine = talker("abcd")
    answers = engine.answers
    engine.answers = lambda request: asked.append(request) or answers(request)
    play(Endless, engine, [{}, {}], n=2, max_turns=8, context_tokens=200, when_full="cut", new_tokens=8)
    keys = [(r.prompt, r.first_sample, len(r.prompt_ids) + i) for r in asked for i in range(5)]
    assert len(set(keys)) == len(keys)


# -- the engine ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy():
    return load("tiny")


def native(policy):
    return NativeEngine(policy.model, policy.tokenizer, stop_ids=policy.stop_ids, context_length=policy.context_length)


def prefilled(engine, monkeypatch):
    """Tokens that the engine computes before sampling, call by call."""
    counts, decoder = [], engine._decoder
    prefill, go_on = decoder.prefill, decoder.go_on
    monkeypatch.setattr(decoder, "prefill", lambda ids: counts.append(ids.numel()) or prefill(ids))
    monkeypatch.setattr(decoder, "go_on", lambda ids, pasts: counts.append(sum(map(len, ids))) or go_on(ids, pasts))
    return counts


def test_the_engine_reads_each_turn_once_and_its_cache_changes_nothing(policy, monkeypatch):
    remembering, forgetting = native(policy), native(policy)
    new, all_over = prefilled(remembering, monkeypatch), prefilled(forgetting, monkeypatch)
    monkeypatch.setattr(forgetting, "keep", lambda conversation, ids, kv: None)
    rows = [{"prompt": "go"}, {"prompt": "and on"}]
    with_cache = play(Echo, remembering, rows, n=2, new_tokens=6)
    plain = play(Echo, forgetting, rows, n=2, new_tokens=6)
    for a, b in zip(with_cache, plain, strict=True):
        one, other = only(a), only(b)
        assert one.ids == other.ids
        assert one.roles == other.roles
        gaps = [
            abs(x - y)
            for x, y in zip(one.behaviour_logprobs, other.behaviour_logprobs, strict=True)
            if not math.isnan(x)
        ]
        assert max(gaps) < 1e-4
    not_sampled = sum(role not in (Role.CONTENT, Role.STOP) for e in with_cache for role in only(e).roles)
    # Beside what others wrote: the last token of each turn, which was sampled but not fed, and padding of the first.
    assert sum(new) <= not_sampled + 4 * 2 + 4 * 6
    assert sum(all_over) > 2 * sum(new)


def test_an_episode_is_the_same_whoever_else_plays(policy):
    rows = [{"prompt": f"go {i}"} for i in range(4)]
    together = play(Echo, native(policy), rows, n=2, new_tokens=6)
    wanted = Wanted(prompt=2, sample=1, row=rows[2], seed=2)
    alone = player(Echo, native(policy)).play([wanted], Sampling(max_new_tokens=6), seed=0, step=0)
    found = next(e for e in together if (e.wanted.prompt, e.wanted.sample) == (2, 1))
    assert only(alone[0]).ids == only(found).ids


class Late(LocalEnvs):
    """Hands each answer on some steps of the engine later, by chance."""

    def __init__(self, factory, seed):
        super().__init__(factory)
        self.rng = Random(seed)

    def receive(self, *, wait):
        held, come = self._answers, []
        self._answers = []
        for answer in held:
            (come if self.rng.random() < 0.2 else self._answers).append(answer)
        return come or ([self._answers.pop(0)] if wait and self._answers else [])


class Together(LocalEnvs):
    """Hands answers on when all have come."""

    def receive(self, *, wait):
        return sorted(super().receive(wait=wait), key=lambda pair: pair[0]) if wait else []


def test_when_environments_answer_changes_no_token_and_no_bit(policy):
    rows = [{"prompt": "go" * i} for i in range(1, 5)]

    def found(envs):
        episodes = play(envs, native(policy), rows, n=3, new_tokens=9)
        return [(t.ids, t.roles, list(map(repr, t.behaviour_logprobs))) for t in map(only, episodes)]

    at_once = found(LocalEnvs(Wordy))
    assert found(Together(Wordy)) == at_once
    for seed in (0, 1):
        assert found(Late(Wordy, seed)) == at_once


def test_an_episode_goes_on_while_the_environment_of_another_has_not_answered(tmp_path):
    """The first environment's answer waits for the other's last one."""
    over = str(tmp_path / "over")
    with EnvPool(Dawdling, workers=2) as envs:
        episodes = play(envs, talker("a"), [{"waits_for": over}, {"makes": over}])
    assert [(e.finish, e.counts["turns"]) for e in episodes] == [(Finish.ENVIRONMENT, 3)] * 2


def test_another_step_draws_other_tokens(policy):
    wanted = [Wanted(prompt=0, sample=0, row={"prompt": "go"}, seed=0)]
    found = [
        only(player(Echo, native(policy)).play(wanted, Sampling(max_new_tokens=6), seed=0, step=step)[0]).ids
        for step in (0, 0, 1)
    ]
    assert found[0] == found[1] != found[2]


def test_sampled_ids_are_never_encoded_again():
    odd = [104, 195]  # 'h' and half a character: decoding and encoding gives other ids
    engine = talker("x")
    engine._script = lambda request, sample: [*odd, 258]
    (episode,) = play(Echo, engine, [{"prompt": "go"}])
    trajectory = only(episode)
    assert [trajectory.ids[s:e] for s, e in trajectory.turns] == [(*odd, 258)] * 3
    assert encode(TOKENIZER.decode(odd)) != odd
    assert torch.tensor(trajectory.ids).max() < 259
