"""Context managers: what each keeps of the past, and that what trains is what was sampled, whichever it is."""

import dataclasses
import math

import pytest
from agent_envs import Echo, Endless
from hypothesis import given, settings
from hypothesis import strategies as st
from talking import TOKENIZER, encode, play, player, spoken, talker

from rolecall.agents.context import COLUMN, QUESTION
from rolecall.agents.played import Lesson, Wanted
from rolecall.config.agents import AgentOptions
from rolecall.errors import UserError
from rolecall.experience.batches import Joined, collate
from rolecall.maths.reduce import denominator_of, position_weights, sequence_lengths
from rolecall.maths.roles import Role, TrainRule
from rolecall.policy.tiny import TURN_END_ID
from rolecall.rollout.scripted import ScriptedEngine
from rolecall.types import Finish, Sampling

MANAGERS = ("append", "window", "memory", "summary", "thoughts")
HEAD = "<|im_start|>assistant\n"
ASKED = QUESTION["content"]


def samples(episode):
    return episode.trajectories(group=0)["agent"]


def read_and_said(trajectory):
    return [(who, roles, text) for who, roles, text in spoken(trajectory) if who not in ("prompt", "template")]


# -- what each keeps ---------------------------------------------------------------------------------------------------


def test_a_summary_is_the_policys_own_trains_and_stands_for_all_before():
    asked = []

    def script(request, sample):
        asked.append(text := TOKENIZER.decode(request.prompt_ids))
        answer = "two so far" if text.endswith(f"{ASKED}<|im_end|>\n{HEAD}") else "abcd"
        return [*encode(answer), TURN_END_ID]

    engine = ScriptedEngine(script, stop_ids=(TURN_END_ID,))
    how = {"context": "summary", "context_tokens": 320, "max_turns": 5, "new_tokens": 12}
    (episode,) = play(Endless, engine, [{"prompt": "go"}], **how)
    first, second, *_ = samples(episode)
    assert read_and_said(first)[-3:] == [
        ("policy", "CS", "abcd<|im_end|>"),
        ("memory", "O", ASKED),
        ("policy", "CS", "two so far<|im_end|>"),
    ]
    turns = sum(text == "abcd<|im_end|>" for *_, text in read_and_said(first))
    assert read_and_said(second)[:3] == [
        ("memory", "O", "Your summary:\ntwo so far"),
        ("tool", "O", f"heard {turns}"),
        ("policy", "CS", "abcd<|im_end|>"),
    ]
    assert spoken(second)[0][:2] == ("prompt", "P")
    assert episode.counts["summaries"] == episode.counts["context_cuts"] == len(samples(episode)) - 1
    assert episode.counts["turns"] == 5, "a summary is no turn"
    assert episode.view["heard"] == ["abcd"] * 5, "and the environment does not hear it"
    said = [m["content"] for m in episode.sides["agent"].messages if m["role"] == "assistant"]
    assert said.count("two so far") == episode.counts["summaries"]


def test_old_thoughts_are_dropped_and_what_remains_is_only_read():
    lines = ("<think>first</think>\none", "two", "<think>cut off", "four")
    said = iter(lines)
    engine = ScriptedEngine(lambda request, sample: [*encode(next(said)), TURN_END_ID], stop_ids=(TURN_END_ID,))

    class Four(Echo):
        rounds = 4

    (episode,) = play(Four, engine, [{"prompt": "go"}], context="thoughts")
    assert [read_and_said(t) for t in samples(episode)] == [
        [("policy", "CS", "<think>first</think>\none<|im_end|>")],
        [
            ("history", "O", "one"), ("tool", "O", "heard 1"), ("policy", "CS", "two<|im_end|>"),
            ("tool", "O", "heard 2"), ("policy", "CS", "<think>cut off<|im_end|>"),
        ],
        [
            ("history", "O", "one"), ("tool", "O", "heard 1"), ("history", "O", "two"), ("tool", "O", "heard 2"),
            ("tool", "O", "heard 3"), ("policy", "CS", "four<|im_end|>"),
        ],
    ]  # fmt: skip
    assert episode.counts["context_cuts"] == 2
    assert episode.view["heard"] == list(lines), "the environment hears all of it"


def test_notes_stay_when_the_turns_they_were_written_in_are_dropped():
    lines = ["<note>the key is  red</note> a", "b", "<note>door 3</note>", *"cdefgh"]
    count = iter(range(99))
    engine = ScriptedEngine(lambda request, sample: [*encode(lines[next(count)]), TURN_END_ID], stop_ids=(TURN_END_ID,))
    how = {"context": "memory", "context_tokens": 220, "max_turns": 9, "new_tokens": 36}
    (episode,) = play(Endless, engine, [{"prompt": "go"}], **how)
    assert len(samples(episode)) > 2
    notes = [text for t in samples(episode)[1:] for who, roles, text in spoken(t) if who == "memory"]
    assert len(notes) == len(samples(episode)) - 1
    assert notes[0].startswith("Your notes:\n- the key is red")
    assert notes[-1] == "Your notes:\n- the key is red\n- door 3", "also those of turns that were dropped before"


def test_when_full_cut_is_the_window():
    how = {"max_turns": 8, "context_tokens": 200, "new_tokens": 8}
    (old,) = play(Endless, talker("abcd"), when_full="cut", **how)
    (new,) = play(Endless, talker("abcd"), context="window", **how)
    assert [t.ids for t in samples(old)] == [t.ids for t in samples(new)]
    assert len(samples(old)) > 1
    with pytest.raises(ValueError, match=r"when_full cut is agent.context window, and there is summary: keep one"):
        AgentOptions(when_full="cut", context="summary")


def test_a_row_names_its_own_and_an_unknown_name_is_refused():
    how = {"max_turns": 8, "context_tokens": 200, "new_tokens": 8}
    whole, cut = play(Endless, talker("abcd"), [{}, {COLUMN: "window"}], **how)
    assert (len(samples(whole)), whole.finish) == (1, Finish.LENGTH)
    assert (len(samples(cut)) > 1, cut.finish) == (True, Finish.MAX_TURNS)
    with pytest.raises(UserError, match="context_manager is 'shrink': choose one of append, window"):
        play(Endless, talker("abcd"), [{COLUMN: "shrink"}], **how)


def test_a_summary_for_which_there_is_no_room_ends_the_episode():
    (episode,) = play(Endless, talker("abcd"), [{"prompt": "go"}], context="summary", context_tokens=120, new_tokens=8)
    assert episode.finish is Finish.LENGTH
    assert all(len(t.ids) <= 120 for t in samples(episode))


# -- what trains is what was sampled -----------------------------------------------------------------------------------

PIECES = st.sampled_from(
    ["a", "bc", " ", "<think>", "</think>", "<note>", "</note>", "é", "\n", "<|im_end|>", "x" * 20]
)
TURN = st.tuples(st.lists(PIECES, max_size=5).map("".join), st.booleans())


@settings(max_examples=40, deadline=None)
@given(
    manager=st.sampled_from(MANAGERS),
    turns=st.lists(TURN, min_size=1, max_size=6),
    limit=st.integers(90, 420),
    guided=st.booleans(),
)
def test_trained_ids_are_the_sampled_ones_whatever_the_manager(manager, turns, limit, guided):
    asked, said = [], []

    def script(request, sample):
        text, stops = turns[len(said) % len(turns)]
        return [*encode(text), TURN_END_ID] if stops else encode(text) or [97]

    engine = ScriptedEngine(script, stop_ids=(TURN_END_ID,))
    answers = engine.answers

    def spied(request):
        found = list(answers(request))
        asked.append(request)
        said.extend(found)
        return found

    engine.answers = spied
    recall = (lambda prompt: [Lesson(id=1, text="be brief")]) if guided else None
    wanted = [Wanted(prompt=0, sample=0, row={"prompt": "go", COLUMN: manager}, seed=0, recall=recall)]
    made = player(Endless, engine, max_turns=7, context_tokens=limit)
    (episode,) = made.play(wanted, Sampling(max_new_tokens=24), seed=0, step=0)
    found = samples(episode)
    own = [
        (i, p)
        for t in found
        for i, p, role in zip(t.ids, t.behaviour_logprobs, t.roles, strict=True)
        if role in (Role.CONTENT, Role.STOP)
    ]
    assert own == [(i, p) for c in said for i, p in zip(c.ids, c.behaviour_logprobs, strict=True)]
    for t in found:
        assert [not math.isnan(p) for p in t.behaviour_logprobs] == [r in (Role.CONTENT, Role.STOP) for r in t.roles]
        assert TrainRule().eligible(collate([t]).roles).sum() == sum(end - start for start, end in t.turns)
    held = [
        (*(t.behaviour_prompt_ids or t.ids[: t.turns[0][0]]), *t.ids[t.turns[0][0] : start])
        for t in found
        for start, _ in t.turns
    ]
    assert held == [r.prompt_ids for r in asked], "what was read before each turn is what the sample holds before it"
    assert all(len(r.prompt_ids) + r.sampling.max_new_tokens <= limit for r in asked)
    keys = [
        (r.first_sample, len(r.prompt_ids) + k) for r, c in zip(asked, said, strict=True) for k in range(len(c.ids))
    ]
    assert len(set(keys)) == len(keys), "no random number is used twice"


@pytest.mark.parametrize("manager", MANAGERS[1:])
def test_the_samples_of_an_episode_share_one_weight(manager):
    lines = ("<think>m</think>ab", "<note>n</note>cd")
    how = {"context": manager, "max_turns": 6, "context_tokens": 330 if manager == "summary" else 230, "new_tokens": 18}
    episodes = play(Endless, talker(*lines), [{"prompt": "go"}], n=2, **how)
    found = [t for e in episodes for t in samples(e)]
    assert len(found) > 2
    joined, batch = Joined(found), collate(found)
    assert len(joined) == 2, "one sequence each"
    mask = TrainRule().eligible(batch.roles)
    lengths = sequence_lengths(mask, dataclasses.replace(batch, episodes=joined.names).episodes)
    weights = position_weights(
        mask, mode="seq-mean-token-mean", lengths=lengths,
        denominator=denominator_of(mask, mode="seq-mean-token-mean", lengths=lengths),
    )  # fmt: skip
    shares = [float(weights[rows].sum()) for rows in joined.rows]
    assert shares == pytest.approx([0.5, 0.5], abs=1e-6)
