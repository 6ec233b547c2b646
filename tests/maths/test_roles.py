import random

import loops
import pytest
import torch

from rolecall.conformance.compare import bits
from rolecall.maths.returns import gae
from rolecall.maths.roles import Role, TrainRule, Verdict, episode_roles, response_roles, roles_of_ids
from rolecall.maths.shaping import place_scores, untrainable

LETTERS = {"P": Role.PROMPT, "C": Role.CONTENT, "S": Role.STOP, ".": Role.PAD, ">": Role.AFTER_END}
LETTERS |= {"O": Role.OBSERVATION, "N": Role.NO_CHOICE}
BOTH_RULES = (TrainRule(), TrainRule(stop=False))


def roles(*rows: str) -> torch.Tensor:
    return torch.tensor([[LETTERS[letter] for letter in row.replace(" ", "")] for row in rows], dtype=torch.uint8)


def drawn(tensor: torch.Tensor) -> list[str]:
    names = {int(role): letter for letter, role in LETTERS.items()}
    return ["".join(names[code] for code in row) for row in tensor.tolist()]


def keeps_the_score_or_says_so(eligible: torch.Tensor) -> bool:
    """sum(reward * mask) == score, or the row is untrainable."""
    scores = torch.arange(1.0, len(eligible) + 1)
    placed = torch.where(eligible, place_scores(scores, eligible), 0).sum(dim=1)
    return bool(((placed == scores) | untrainable(eligible)).all()) and bool((placed[untrainable(eligible)] == 0).all())


# --- answers -------------------------------------------------------------------------------------------------------


def test_two_answers_under_both_rules():
    # eight tokens of content, cut off by the limit; six of content, a stop and one pad
    written = response_roles(torch.tensor([8, 7]), torch.tensor([False, True]), width=8)
    assert drawn(written) == ["CCCCCCCC", "CCCCCCS."]
    assert TrainRule(stop=False).eligible(written).equal(bits("1111 1111", "1111 1100"))
    assert TrainRule().eligible(written).equal(bits("1111 1111", "1111 1110"))


@pytest.mark.parametrize("rule", BOTH_RULES)
@pytest.mark.parametrize(
    ("length", "stopped", "row"),
    [
        (8, False, "CCCCCCCC"),  # no stop at the maximum length: cut off
        (8, True, "CCCCCCCS"),  # the stop is the last token there is room for
        (3, True, "CCS....."),
        (3, False, "CCC....."),  # ended by a stop string, or cut off by a shorter limit of its own
        (1, True, "S......."),  # the empty answer: an immediate stop
        (0, False, "........"),  # nothing was sampled at all
    ],
)
def test_answers_keep_their_score_under_every_rule(rule, length, stopped, row):
    written = response_roles(torch.tensor([length]), torch.tensor([stopped]), width=8)
    assert drawn(written) == [row]
    assert keeps_the_score_or_says_so(rule.eligible(written))


def test_an_immediate_stop_trains_only_if_the_rule_trains_stops():
    written = response_roles(torch.tensor([1]), torch.tensor([True]), width=4)
    assert untrainable(TrainRule().eligible(written)).tolist() == [False]
    assert untrainable(TrainRule(stop=False).eligible(written)).tolist() == [True]
    assert TrainRule(stop=False).verdicts(written)[0, 0] == Verdict.STOP_UNTRAINED


@pytest.mark.parametrize("rule", BOTH_RULES)
def test_pad_and_stop_may_be_the_same_id(rule):
    # ids     7 9 2 2 2        2 is both; the engine knows that three tokens were sampled and the last one stopped
    # roles   C C S . .
    known = response_roles(torch.tensor([3]), torch.tensor([True]), width=5)
    assert drawn(known) == ["CCS.."]
    # from bare ids the same positions train; what stands behind is called after the end
    bare = roles_of_ids(torch.tensor([[7, 9, 2, 2, 2]]), stop_ids=[2])
    assert drawn(bare) == ["CCS>>"]
    assert rule.eligible(known).equal(rule.eligible(bare))
    assert keeps_the_score_or_says_so(rule.eligible(bare))


def test_a_sampled_pad_id_is_content():
    ids = torch.tensor([[7, 0, 9, 2, 0, 0]])  # 0 pads, 2 stops; the policy chose the first 0
    assert drawn(roles_of_ids(ids, stop_ids=[2], lengths=torch.tensor([4]))) == ["CCCS.."]
    assert drawn(response_roles(torch.tensor([4]), torch.tensor([True]), width=6)) == ["CCCS.."]


def test_a_sampled_pad_id_is_content_when_pad_is_a_stop_id_that_did_not_stop():
    # The engine was told to stop at 3 only; 2, which pads and usually stops, was sampled on the way.
    assert drawn(roles_of_ids(torch.tensor([[7, 2, 9, 3, 2]]), stop_ids=[3], lengths=torch.tensor([4]))) == ["CCCS."]


def test_any_of_several_stop_ids_ends_the_answer():
    ids = torch.tensor([[7, 8, 2, 9, 0], [7, 3, 2, 9, 0], [7, 8, 9, 9, 9]])
    assert drawn(roles_of_ids(ids, stop_ids={2, 3})) == ["CCS>>", "CS>>>", "CCCCC"]


def test_a_stop_id_in_the_prompt_ends_nothing():
    # prompt  5 2 6      the 2 closes an earlier turn
    # answer  7 2
    prompt = roles("PPP")
    answer = response_roles(torch.tensor([2]), torch.tensor([True]), width=2)
    whole = torch.cat([prompt, answer], dim=1)
    assert drawn(whole) == ["PPPCS"]
    assert TrainRule().eligible(whole).equal(bits("00011"))


def test_the_first_stop_that_lies_behind_the_length_is_padding():
    assert drawn(roles_of_ids(torch.tensor([[7, 8, 2]]), stop_ids=[2], lengths=torch.tensor([2]))) == ["CC."]
    assert drawn(roles_of_ids(torch.tensor([[7, 2, 2]]), stop_ids=[2], lengths=torch.tensor([0]))) == ["..."]


def test_roles_of_ids_walks_as_a_loop_does():
    generator = random.Random(0)
    for _ in range(50):
        width = generator.randint(1, 9)
        ids = [[generator.randint(0, 4) for _ in range(width)] for _ in range(3)]
        lengths = [generator.randint(0, width) for _ in ids]
        expected = [
            loops.first_stop_roles(row, stop_ids={1, 3}, length=length)
            for row, length in zip(ids, lengths, strict=True)
        ]
        assert drawn(roles_of_ids(torch.tensor(ids), stop_ids=(3, 1), lengths=torch.tensor(lengths))) == expected


# --- verdicts ------------------------------------------------------------------------------------------------------


def test_each_role_has_its_verdict():
    #                  pad  prompt content stop observation no-choice after-end
    row = roles(". P C S O N >")
    names = lambda rule: [Verdict(code).name for code in rule.verdicts(row)[0].tolist()]
    tail = ["OBSERVED", "NO_CHOICE", "AFTER_END"]
    assert names(TrainRule()) == ["PADDING", "GIVEN", "TRAINED", "TRAINED", *tail]
    assert names(TrainRule(stop=False)) == ["PADDING", "GIVEN", "TRAINED", "STOP_UNTRAINED", *tail]
    assert names(TrainRule(content=False)) == ["PADDING", "GIVEN", "OBSERVED", "TRAINED", *tail]


def test_the_first_fact_that_holds_gives_the_verdict():
    order = ["bad_record", "reward_failed", "replay_observed", "blackout", "truncated", "flat_group"]
    row = roles("P C . S")
    for first in range(len(order)):
        facts = {name: torch.tensor([True]) for name in order[first:] if name != "blackout"}
        if "blackout" in order[first:]:
            facts["blackout"] = torch.ones(1, 4, dtype=torch.bool)
        code = int(Verdict[order[first].upper()])
        assert TrainRule().verdicts(row, **facts).tolist() == [[Verdict.GIVEN, code, Verdict.PADDING, code]]


def test_a_fact_that_does_not_hold_changes_nothing():
    row = roles("PCCS", "PCS.")
    facts = dict.fromkeys(
        ("reward_failed", "replay_observed", "truncated", "flat_group", "bad_record"), torch.tensor([False, False])
    )
    assert TrainRule().verdicts(row, **facts).equal(TrainRule().verdicts(row))


def test_facts_hold_for_their_row_and_blackouts_for_their_positions():
    row = roles("PCCS", "PCCS")
    verdicts = TrainRule().verdicts(row, reward_failed=torch.tensor([False, True]), blackout=bits("1010", "1010"))
    t, b, f, g = Verdict.TRAINED, Verdict.BLACKOUT, Verdict.REWARD_FAILED, Verdict.GIVEN
    assert verdicts.tolist() == [[g, t, b, t], [g, f, f, f]]


def test_a_bad_record_may_be_a_position_or_a_row():
    row = roles("PCCS", "PCCS")
    t, x, g = Verdict.TRAINED, Verdict.BAD_RECORD, Verdict.GIVEN
    assert TrainRule().verdicts(row, bad_record=bits("1100", "0000")).tolist() == [[g, x, t, t], [g, t, t, t]]
    assert TrainRule().verdicts(row, bad_record=torch.tensor([False, True])).tolist() == [[g, t, t, t], [g, x, x, x]]


def test_every_verdict_has_a_sentence_of_its_own():
    sentences = [verdict.sentence for verdict in Verdict]
    assert len(set(sentences)) == len(Verdict)
    assert all(sentence.endswith(".") and len(sentence) > 20 for sentence in sentences)


def test_numbers_in_files_do_not_move():
    assert [(role.name, int(role)) for role in Role] == list(
        zip(["PAD", "PROMPT", "CONTENT", "STOP", "OBSERVATION", "NO_CHOICE", "AFTER_END"], range(7), strict=True)
    )
    assert [verdict.name for verdict in sorted(Verdict)] == [
        *("PADDING", "TRAINED", "GIVEN", "OBSERVED", "NO_CHOICE", "STOP_UNTRAINED", "BLACKOUT", "AFTER_END"),
        *("TRUNCATED", "REWARD_FAILED", "FLAT_GROUP", "REPLAY_OBSERVED", "BAD_RECORD"),
    ]
    assert TrainRule().verdicts(torch.zeros(1, 2, dtype=torch.uint8)).tolist() == [[0, 0]]


def test_results_are_bytes():
    assert response_roles(torch.tensor([1]), torch.tensor([True]), width=2).dtype == torch.uint8
    assert roles_of_ids(torch.tensor([[1]]), stop_ids=[1]).dtype == torch.uint8
    assert episode_roles(bits("11"), bits("10")).dtype == torch.uint8
    assert TrainRule().verdicts(roles("PC"), truncated=torch.tensor([True])).dtype == torch.uint8


# --- episodes ------------------------------------------------------------------------------------------------------


def pymarl_mask(filled: torch.Tensor, terminated: torch.Tensor) -> torch.Tensor:
    mask = filled[:, :-1].long().clone()
    mask[:, 1:] *= 1 - terminated[:, :-2].long()
    return mask.bool()


def test_the_end_of_an_episode_is_cumulative():
    #            t   0 1 2 3 4 5 6
    filled = bits("1 1 1 1 1 1 1")
    ended = bits(" 0 0 0 1 0 0 0")
    acts = TrainRule().eligible(episode_roles(filled, ended))
    assert acts[:, :-1].equal(bits("1 1 1 1 0 0"))
    # The one-line formula drops only the step behind the end: with slots filled further it lets t = 5 back in.
    assert pymarl_mask(filled, ended).equal(bits("1 1 1 1 0 1"))


def test_a_batch_of_thirty_two_episodes_of_a_hundred_and_twenty_steps():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 121, (32,), generator=generator)
    lengths[0], lengths[1] = 120, 1
    slot = torch.arange(121)
    filled = slot <= lengths[:, None]
    ended = slot == lengths[:, None] - 1
    ended[0] = False  # the time limit ended the first one
    acts = TrainRule().eligible(episode_roles(filled, ended))
    assert acts.shape == (32, 121)
    assert acts.sum(dim=1).equal(lengths)
    assert acts[:, :-1].equal(pymarl_mask(filled, ended))
    assert not acts[:, -1].any()


def test_a_time_limit_end_bootstraps_from_the_last_slot():
    #  slots          0 1 2 3       three steps, then the observation to bootstrap from
    #  filled         1 1 1 1
    #  terminated     0 0 0 0       a time limit is not an end of the task
    written = episode_roles(bits("1111"), bits("0000"))
    assert drawn(written) == ["CCC>"]
    rewards, values = torch.tensor([[1.0, 1, 1, 0]]), torch.tensor([[0.0, 0, 0, 10]])
    _, returns = gae(rewards, values, TrainRule().eligible(written), gamma=1.0, lam=1.0, bootstrap=values[:, 3])
    assert returns.tolist() == [[13, 12, 11, 0]]


def test_early_truncation_leaves_no_step_behind_it():
    # Cut after two steps in a buffer of five. The one-line formula keeps the bootstrap slot as a third step.
    filled, terminated, truncated = bits("11100"), bits("00000"), bits("01000")
    assert drawn(episode_roles(filled, terminated, truncated)) == ["CC>>>"]
    assert drawn(episode_roles(filled, terminated)) == ["CC>>>"]
    assert pymarl_mask(filled, terminated).equal(bits("1110"))


def test_an_end_flag_on_the_last_filled_slot_makes_it_a_step():
    assert drawn(episode_roles(bits("11100"), bits("00100"))) == ["CCC>>"]
    assert drawn(episode_roles(bits("11100"), bits("00000"), bits("00100"))) == ["CCC>>"]


def test_a_stale_flag_behind_the_filled_slots_ends_nothing():
    assert drawn(episode_roles(bits("11100"), bits("00010"))) == ["CC>>>"]


def test_a_row_without_steps_is_padding_and_one_slot_is_only_a_start():
    assert drawn(episode_roles(bits("000", "100", "111"), bits("000", "000", "100"))) == ["...", ">>>", "C>>"]


def test_episode_roles_walk_as_a_loop_does():
    generator = random.Random(1)
    for _ in range(100):
        width = generator.randint(1, 7)
        steps = generator.randint(0, width)
        filled = [t < steps for t in range(width)]
        terminated, truncated = ([generator.random() < 0.2 for _ in range(width)] for _ in range(2))
        expected = loops.episode_roles(filled, terminated, truncated)
        assert drawn(episode_roles(torch.tensor([filled]), torch.tensor([terminated]), torch.tensor([truncated]))) == [
            expected
        ]


# --- wrong calls ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("users_view")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: response_roles(torch.tensor([3]), torch.tensor([True, False]), width=4),
            r"stopped_by_id has shape \(2,\) but lengths has shape \(1,\)",
        ),
        (lambda: response_roles(torch.tensor([3]), torch.tensor([1]), width=4), "stopped_by_id must be a bool tensor"),
        (lambda: response_roles(torch.tensor([5]), torch.tensor([True]), width=4), r"0\.\.4 .*got 5\.\.5"),
        (lambda: response_roles(torch.tensor([-1, 4]), torch.tensor([False, True]), width=4), r"got -1\.\.4"),
        (lambda: response_roles(torch.tensor([0]), torch.tensor([True]), width=4), "at least that one token"),
        (lambda: roles_of_ids(torch.tensor([[1]]), stop_ids=[]), "stop_ids is empty"),
        (
            lambda: roles_of_ids(torch.tensor([[1]]), stop_ids=[1], lengths=torch.tensor([1, 1])),
            r"lengths has shape \(2,\) but the batch has shape \(1,\)",
        ),
        (lambda: roles_of_ids(torch.tensor([[1]]), stop_ids=[1], lengths=torch.tensor([2])), r"0\.\.1"),
        (lambda: episode_roles(bits("101"), bits("000")), "cannot have holes"),
        (
            lambda: episode_roles(bits("11"), bits("100")),
            r"terminated has shape \(1, 3\) but filled has shape \(1, 2\)",
        ),
        (lambda: episode_roles(bits("11"), bits("10"), bits("100")), "truncated has shape"),
        (lambda: episode_roles(bits("11"), bits("10").float()), "terminated must be a bool tensor, got torch.float32"),
        (
            lambda: TrainRule().verdicts(roles("PC"), truncated=torch.tensor([True, False])),
            r"truncated has shape \(2,\) but the batch has shape \(1,\)",
        ),
        (lambda: TrainRule().verdicts(roles("PC"), blackout=bits("111")), r"blackout has shape \(1, 3\) but roles"),
        (lambda: TrainRule().verdicts(roles("PC"), flat_group=torch.tensor([1])), "flat_group must be a bool tensor"),
    ],
)
def test_wrong_calls_get_a_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call()
