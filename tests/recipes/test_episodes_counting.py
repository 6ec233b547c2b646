"""What is computed of an episode depends neither on what others said in between nor on where its context was cut."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learners import learner_of, options_of

from rolecall.config.rl import AlgorithmOptions
from rolecall.experience.batches import Joined, collate, runs_in
from rolecall.maths.reduce import MODES, aggregate, denominator_of, position_weights, sequence_lengths
from rolecall.maths.roles import Role, TrainRule, Verdict
from rolecall.maths.shaping import shape_rewards
from rolecall.recipes.algorithms import Coefficients, algorithm_of
from rolecall.recipes.collect import Collected
from rolecall.rewards.records import Scored
from rolecall.types import Finish, Trajectory

P, C, S, O = (int(r) for r in (Role.PROMPT, Role.CONTENT, Role.STOP, Role.OBSERVATION))  # noqa: E741
ALGOS = {
    "grpo": AlgorithmOptions(name="grpo"),
    "grpo-batch": AlgorithmOptions(name="grpo", scale="batch"),
    "reinforce": AlgorithmOptions(name="reinforce", baseline="prompt"),
    "grpo-kl-in-reward": AlgorithmOptions(name="grpo", kl_in="reward", kl_coef=0.3, kl_kind="k1"),
    "rloo": AlgorithmOptions(name="rloo"),
    "opo": AlgorithmOptions(name="opo"),
    "reinforce++": AlgorithmOptions(name="reinforce++"),
    "reinforce++-baseline": AlgorithmOptions(name="reinforce++-baseline"),
    "ppo": AlgorithmOptions(name="ppo", critic="shared", gamma=0.97, lam=0.9, whiten_rewards=True),
}


def trajectory(roles, *, group=0, episode=0, agent="agent", finish=Finish.STOP):
    chosen = [role in (C, S) for role in roles]
    return Trajectory(
        ids=tuple(range(1, 1 + len(roles))),
        roles=tuple(roles),
        behaviour_logprobs=tuple(-1.0 if c else float("nan") for c in chosen),
        agent=agent,
        group=group,
        episode=episode,
        finish=finish,
        turns=(),
    )


def with_numbers(trajectories, scores, numbers, algorithm):
    """A batch whose eligible positions hold the given numbers (value, KL), episode by episode; NaN elsewhere."""
    batch, joined = collate(trajectories), Joined(trajectories)
    eligible = TrainRule().eligible(batch.roles)
    fields = {}
    for name, column in zip(("values", "kl"), numbers, strict=True):
        whole = torch.full(joined.join(batch.roles).shape, torch.nan, dtype=torch.float64)
        whole[joined.join(eligible)] = torch.tensor(column, dtype=torch.float64)
        fields[name] = whole
    rewards = shape_rewards(
        torch.tensor(scores, dtype=torch.float64),
        fields["kl"].nan_to_num() if algorithm.kl_in == "reward" and algorithm.kl_coef else None,
        joined.join(eligible),
        kl_coef=algorithm.kl_coef,
    )
    width = batch.ids.shape[1]
    return joined, dataclasses.replace(
        batch,
        scores=joined.split(torch.tensor(scores, dtype=torch.float64), width),
        verdicts=TrainRule().verdicts(batch.roles),
        values=joined.split(fields["values"], width),
        rewards=joined.split(rewards, width),
    )


def advantages_of(trajectories, scores, numbers, algorithm):
    """The advantages at eligible positions, in the order of the episodes."""
    joined, batch = with_numbers(trajectories, scores, numbers, algorithm)
    whole = joined.batch(batch)
    made = algorithm_of(algorithm, Coefficients(max_new_tokens=4, kl_coef=algorithm.kl_coef)).advantage(whole)
    made = made[0] if isinstance(made, tuple) else made
    made = made[:, None].expand(whole.ids.shape) if made.dim() == 1 else made
    return made[TrainRule().eligible(whole.roles)]


@st.composite
def episodes(draw):
    """(roles of each episode, group of each, scores): turns of the policy, one behind the other."""
    count = draw(st.integers(2, 4))
    roles = [[P] + ([C] * draw(st.integers(0, 3)) + [S]) * draw(st.integers(1, 3)) for _ in range(count)]
    return roles, [i % 2 for i in range(count)], [draw(st.integers(-3, 3)) / 2 for _ in range(count)]


def numbers_for(roles):
    total = sum(role in (C, S) for row in roles for role in row)
    generator = torch.Generator().manual_seed(total)
    return torch.randn(2, total, generator=generator, dtype=torch.float64).tolist()


@pytest.mark.parametrize("name", ALGOS)
@settings(max_examples=15)
@given(episodes(), st.data())
def test_tool_output_anywhere_changes_no_advantage(name, drawn, data):
    roles, groups, scores = drawn
    numbers = numbers_for(roles)

    def of(rows):
        found = [trajectory(row, group=groups[i], episode=i) for i, row in enumerate(rows)]
        return advantages_of(found, scores, numbers, ALGOS[name])

    longer = []
    for row in roles:
        wider = list(row)
        for _ in range(data.draw(st.integers(0, 3))):
            at = data.draw(st.integers(0, len(wider)))
            wider[at:at] = [data.draw(st.sampled_from([O, P]))] * data.draw(st.integers(1, 4))
        longer.append(wider)
    assert torch.allclose(of(roles), of(longer), rtol=0, atol=1e-12)


def cut_up(row, at, *, again):
    """One episode as samples that part at the given places; each later one reads some of the past again."""
    edges = [0, *sorted(at), len(row)]
    parts = [row[a:b] for a, b in itertools.pairwise(edges) if b > a]
    return [parts[0]] + [[P] + [O] * again + part for part in parts[1:]]


@pytest.mark.parametrize("name", ALGOS)
@settings(max_examples=15)
@given(episodes(), st.data())
def test_a_cut_changes_no_advantage_and_no_weight(name, drawn, data):
    roles, groups, scores = drawn
    numbers = numbers_for(roles)
    whole = [trajectory(row, group=groups[i], episode=i) for i, row in enumerate(roles)]
    cut = []
    for i, row in enumerate(roles):
        places = data.draw(st.lists(st.integers(1, len(row) - 1), max_size=3, unique=True))
        pieces = cut_up(row, places, again=data.draw(st.integers(0, 3)))
        cut += [trajectory(piece, group=groups[i], episode=i) for piece in pieces]
    expected = advantages_of(whole, scores, numbers, ALGOS[name])
    assert torch.allclose(advantages_of(cut, scores, numbers, ALGOS[name]), expected, rtol=0, atol=1e-12)

    plain, pieces = collate(whole), collate(cut)
    rows = Joined(cut).names
    for mode in MODES:
        norm = 7.0 if mode == "seq-mean-token-sum-norm" else None
        mask = TrainRule().eligible(plain.roles)
        split = TrainRule().eligible(pieces.roles)
        lengths = sequence_lengths(split, rows)
        assert float(denominator_of(split, mode=mode, lengths=lengths)) == pytest.approx(
            float(denominator_of(mask, mode=mode))
        )
        weights = position_weights(split, mode=mode, norm=norm, lengths=lengths)
        assert torch.allclose(weights[split], position_weights(mask, mode=mode, norm=norm)[mask], atol=1e-12)


def test_the_samples_of_an_episode_share_one_weight():
    """
    episode 0 uncut   P C C C S           seq-mean-token-mean: each position 1 / (2 episodes x 4)
    episode 1         P C | P O C | P S   the same 1 / (2 x 3) for each of its three, in three rows
    """
    rows = [[P, C, C, C, S], [P, C], [P, O, C], [P, S]]
    found = [trajectory(row, episode=e) for row, e in zip(rows, (0, 1, 1, 1), strict=True)]
    batch = collate(found)
    mask = TrainRule().eligible(batch.roles)
    lengths = sequence_lengths(mask, Joined(found).names)
    assert lengths.tolist() == [4, 3, 3, 3]
    weights = position_weights(mask, mode="seq-mean-token-mean", lengths=lengths)
    assert weights[0].sum() == pytest.approx(0.5)
    assert weights[1:].sum() == pytest.approx(0.5)
    assert weights[mask].tolist() == pytest.approx([1 / 8] * 4 + [1 / 6] * 3)
    assert aggregate(mask.double(), mask, mode="seq-mean-token-mean") == pytest.approx(1.0)


# -- the learner ----------------------------------------------------------------------------------------------------


class Given:
    """A collector of trajectories that are there."""

    def __init__(self, trajectories, totals):
        self.found = Collected(
            trajectories=trajectories,
            prompts=[""] * len(trajectories),
            answers=[""] * len(trajectories),
            scored=[Scored(scores={"env": t}, total=t) for t in totals],
            rows=[0] * len(trajectories),
            seed=0,
        )

    def collect(self, step):
        return self.found

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def learner_with(trajectories, totals, **settings):
    learner = learner_of(options_of("grpo", prompts=1, samples=len(trajectories), **settings), lambda sample: 0.0)
    learner.collector = Given(trajectories, totals)
    return learner


CUT = [[P, C, C, S], [P, C, S], [P, O, C, S], [P, O, C, C, S], [P, C, S]]
EPISODE = (0, 1, 1, 1, 2)
TOTALS = (1.0, 0.0, 0.0, 0.0, 0.5)


def test_an_episode_in_three_samples_counts_once_in_its_groups_statistics():
    found = [trajectory(row, episode=e) for row, e in zip(CUT, EPISODE, strict=True)]
    rollout = learner_with(found, TOTALS).collect(0)
    mean, std = 0.5, torch.tensor([1.0, 0.0, 0.5]).std()
    wanted = [(total - mean) / (std + 1e-4) for total in TOTALS]
    mask = rollout.batch.verdicts == Verdict.TRAINED
    for row, value in enumerate(wanted):
        assert torch.allclose(rollout.batch.advantages[row][mask[row]], torch.as_tensor(value).float(), atol=1e-5)


def test_the_score_sits_on_the_last_position_of_the_last_sample():
    found = [trajectory(row, episode=e) for row, e in zip(CUT, EPISODE, strict=True)]
    rewards = learner_with(found, (1.0, 0.25, 0.25, 0.25, 0.5)).collect(0).batch.rewards
    assert rewards.sum(dim=1).tolist() == [1.0, 0.0, 0.0, 0.25, 0.5]
    assert rewards[3, 4] == 0.25


def test_metrics_count_episodes_not_samples():
    found = [trajectory(row, episode=e) for row, e in zip(CUT, EPISODE, strict=True)]
    learner = learner_with(found, TOTALS)
    learner.update(learner.collect(0))
    assert learner.metrics()["reward"] == pytest.approx(0.5)
    assert learner.metrics()["completions/max_length"] == 7
    assert learner.metrics()["frac_reward_zero_std"] == 0


def test_cut_episodes_pass_every_tripwire_in_several_minibatches():
    from rolecall.recipes.guard import Guard

    found = [trajectory(row, episode=e) for row, e in zip(CUT, EPISODE, strict=True)]
    learner = learner_with(found, TOTALS, **{"algorithm.minibatches": 2, "algorithm.old_logprobs": "recompute"})
    behaviour = learner.prepare.score(
        learner.module, collate(found), TrainRule().eligible(collate(found).roles)
    ).logprobs
    found = [
        dataclasses.replace(
            t, behaviour_logprobs=tuple(x if r in (C, S) else float("nan") for x, r in zip(row, t.roles, strict=False))
        )
        for t, row in zip(found, behaviour.tolist(), strict=True)
    ]
    learner.collector = Given(found, TOTALS)
    guard = Guard(
        learner.options,
        policy=learner.policy,
        updater=learner.updater,
        engine=learner.engine,
        engine_dtype=torch.float32,
    )
    learner.watches = [guard]
    steps = learner.update(learner.collect(0))
    assert guard.metrics()["weights_moved"] == 1
    together = [{EPISODE[row] for row in step.rows.tolist()} for step in steps]
    assert not together[0] & together[1], "an episode is in one optimiser step"


def test_cut_episodes_are_replayed_whole():
    """Fresh episodes that are not cut beside replayed ones that are: each sequence keeps its one weight."""
    first = [trajectory(row, episode=e, group=0) for row, e in zip(CUT, EPISODE, strict=True)]
    second = [trajectory([P, C, S], episode=e, group=1) for e in range(3)]
    learner = learner_with(first, TOTALS, **{"replay.share": 0.5, "algorithm.minibatches": 2})
    learner.update(learner.collect(0))
    learner.collector = Given(second, (0.0, 1.0, 0.0))
    rollout = learner.collect(1)
    episodes = rollout.training.episodes
    assert [int((episodes == number).sum()) for number in episodes.unique()].count(3) == 1
    assert len(episodes.unique()) == 6
    steps = learner.update(rollout)
    assert all(not step.result.skipped for step in steps)
    names = [set(step.batch.episodes.tolist()) for step in steps]
    assert not names[0] & names[1]


def test_players_are_compared_with_their_like_only():
    """Two games of one deal: the first player won one and lost one, and so did the second."""
    found, totals = [], []
    for episode, won in enumerate((1.0, -1.0)):
        for agent, total in (("first", won), ("second", -won + 5)):
            found.append(trajectory([P, C, S], episode=episode, agent=agent))
            totals.append(total)
    batch = learner_with(found, totals).collect(0).batch
    signs = batch.advantages[:, 1].sign().tolist()
    assert signs == [1, -1, -1, 1]
    assert batch.advantages[0, 1] == pytest.approx(float(batch.advantages[3, 1])), "not shifted by the other's 5"
    assert batch.groups.tolist() == [0] * 4, "one group on disk"


def test_blacked_out_words_do_not_train_and_say_so():
    from rolecall.policy.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    text = tokenizer("ab<calc>12</calc>", add_special_tokens=False)["input_ids"]
    roles = [P, P] + [C] * (len(text) - 2)
    t = dataclasses.replace(trajectory(roles), ids=tuple(text))
    other = dataclasses.replace(trajectory([P] * len(text) + [C, S], episode=1), ids=(*text, 5, 6))
    learner = learner_with([t, other], (1.0, 0.0), blackout=["<calc>", "</calc>"])
    verdicts = learner.collect(0).batch.verdicts
    letters = "".join(
        "x" if v == Verdict.BLACKOUT else "t" if v == Verdict.TRAINED else "." for v in verdicts[0].tolist()
    )
    assert letters.startswith("..xxxxxxttxxxxxxx")
    assert not (verdicts[1] == Verdict.BLACKOUT).any(), "the same text in a prompt is given, not blacked out"


def test_runs_are_found_where_they_overlap_and_not_across_turns():
    ids = [1, 7, 7, 7, 2, 7, 7]
    t = dataclasses.replace(trajectory([P, C, C, C, O, C, C]), ids=tuple(ids))
    assert runs_in(collate([t]), [(7, 7)])[0].tolist() == [False, True, True, True, False, True, True]
    assert not runs_in(collate([t]), [(7, 2)]).any()


def test_without_cuts_nothing_is_touched():
    found = [trajectory([P, C, S], episode=i) for i in range(3)]
    batch, joined = collate(found), Joined(found)
    assert joined.plain
    assert joined.batch(batch) is batch
    assert joined.join(batch.ids) is batch.ids
    assert learner_with(found, (0.0, 1.0, 2.0)).collect(0).batch.episodes is None
