import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import runner_episodes

from rolecall.maths.roles import Role, TrainRule, Verdict, episode_roles, response_roles, roles_of_ids
from rolecall.maths.shaping import place_scores, untrainable

RULES = st.builds(TrainRule, content=st.booleans(), stop=st.booleans())


@st.composite
def role_tensors(draw):
    batch, time = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    codes = draw(st.lists(st.sampled_from(list(Role)), min_size=batch * time, max_size=batch * time))
    return torch.tensor(codes, dtype=torch.uint8).reshape(batch, time)


@st.composite
def roles_with_facts(draw):
    roles = draw(role_tensors())
    per_row = lambda: torch.tensor(draw(st.lists(st.booleans(), min_size=len(roles), max_size=len(roles))))
    facts = {name: per_row() for name in ("reward_failed", "replay_observed", "truncated", "flat_group")}
    size = roles.numel()
    for name in ("bad_record", "blackout"):
        facts[name] = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size))).reshape(roles.shape)
    chosen = draw(st.sets(st.sampled_from(sorted(facts))))
    return roles, {name: facts[name] for name in sorted(chosen)}


@given(roles_with_facts(), RULES)
def test_verdicts_partition_the_positions(case, rule):
    roles, facts = case
    verdicts, eligible = rule.verdicts(roles, **facts), rule.eligible(roles)
    counts = [(verdicts == code).sum().item() for code in Verdict]
    assert sum(counts) == roles.numel()

    from_facts = torch.zeros_like(eligible)
    for fact in facts.values():
        from_facts |= fact if fact.dim() == 2 else fact[:, None]
    assert (verdicts == Verdict.TRAINED).equal(eligible & ~from_facts)
    assert rule.verdicts(roles)[~eligible].equal(verdicts[~eligible])


@given(roles_with_facts(), RULES)
def test_padding_and_row_order_leave_verdicts_alone(case, rule):
    roles, facts = case
    verdicts = rule.verdicts(roles, **facts)
    pad = torch.nn.functional.pad
    wide = {name: pad(fact, (0, 2)) if fact.dim() == 2 else fact for name, fact in facts.items()}
    padded = rule.verdicts(pad(roles, (0, 2)), **wide)
    assert padded[:, :-2].equal(verdicts)
    assert (padded[:, -2:] == Verdict.PADDING).all()
    assert rule.verdicts(roles.flip(0), **{name: fact.flip(0) for name, fact in facts.items()}).equal(verdicts.flip(0))


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=5), RULES)
def test_every_answer_keeps_its_score_or_is_untrainable(answers, rule):
    lengths = torch.tensor([length for length, _ in answers])
    stopped = torch.tensor([stopped and length > 0 for length, stopped in answers])
    roles = response_roles(lengths, stopped, width=6)
    eligible = rule.eligible(roles)
    scores = torch.arange(1.0, len(answers) + 1)
    placed = torch.where(eligible, place_scores(scores, eligible), 0).sum(dim=1)
    assert placed.equal(torch.where(untrainable(eligible), 0, scores))
    assert ((roles == Role.CONTENT) | (roles == Role.STOP)).sum(dim=1).equal(lengths)
    assert (roles == Role.STOP).any(dim=1).equal(stopped)


@given(st.data())
def test_ids_and_engine_facts_give_the_same_roles(data):
    """An answer of content ids that may end with one of two stop ids, padded with a stop id."""
    width = data.draw(st.integers(1, 7))
    length = data.draw(st.integers(1, width))
    stopped = data.draw(st.booleans())
    ids = data.draw(st.lists(st.integers(10, 20), min_size=length, max_size=length))
    if stopped:
        ids[-1] = data.draw(st.sampled_from([2, 3]))
    padded = torch.tensor([ids + [2] * (width - length)])
    lengths = torch.tensor([length])
    by_ids = roles_of_ids(padded, stop_ids=(2, 3), lengths=lengths)
    assert by_ids.equal(response_roles(lengths, torch.tensor([stopped]), width=width))
    if stopped:
        assert TrainRule().eligible(roles_of_ids(padded, stop_ids=(2, 3))).equal(TrainRule().eligible(by_ids))


@given(runner_episodes())
def test_on_what_a_runner_records_the_one_line_formula_agrees(episodes):
    filled, terminated, _ = episodes
    mask = filled[:, :-1].long().clone()
    mask[:, 1:] *= 1 - terminated[:, :-2].long()
    acts = TrainRule().eligible(episode_roles(filled, terminated))
    assert acts[:, :-1].equal(mask.bool())
    assert not acts[:, -1].any()


@given(runner_episodes(), st.integers(1, 3))
def test_slots_behind_the_end_change_nothing(episodes, extra):
    filled, terminated, _ = episodes
    pad = torch.nn.functional.pad
    longer = episode_roles(pad(filled, (0, extra)), pad(terminated, (0, extra)))
    assert longer[:, :-extra].equal(episode_roles(filled, terminated))
    assert (longer[:, -extra:] == Role.AFTER_END).all()
    # Filling on behind a real end, as a stale buffer does, changes nothing either.
    ended = terminated.any(dim=1)
    stale = filled | ended[:, None]
    assert episode_roles(stale, terminated)[ended].equal(episode_roles(filled, terminated)[ended])
