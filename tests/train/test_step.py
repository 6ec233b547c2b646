"""A step does not depend on how its batch is laid out, and touches nothing when there is nothing to learn."""

import dataclasses

import pytest
import torch
from small_policy import GRPO, PPO, VOCABULARY, gradient, loss_of, scripted_batch, small_policy, updater

from rolecall.maths import losses
from rolecall.maths.kl import kl_estimate
from rolecall.maths.reduce import MODES, aggregate
from rolecall.maths.roles import Role, Verdict
from rolecall.policy import logprobs
from rolecall.policy.model import PolicyModel
from rolecall.train.progress import Quiet
from rolecall.train.step import Term, trained
from rolecall.train.timing import Timer

CASES = {
    "grpo": (GRPO, "none"),
    "dr_grpo": (dataclasses.replace(GRPO, aggregate="seq-mean-token-sum-norm"), "none"),
    "ppo_shared": (PPO, "shared"),
    "ppo_separate": (dataclasses.replace(PPO, critic="separate"), "separate"),
}


def stepped(batch, case="grpo", *, budget=10_000, record=False):
    """(result, gradient) of one step from fresh weights."""
    options, critic = CASES[case]
    module = small_policy(critic=critic)
    result = updater(module, token_budget=budget).step(batch, loss_of(options), temperature=0.7, record=record)
    return result, gradient(module)


def same(first, second, tolerance=1e-10):
    (a, grad_a), (b, grad_b) = first, second
    assert abs(a.loss - b.loss) <= tolerance
    assert a.terms.keys() == b.terms.keys()
    assert all(abs(a.terms[name] - b.terms[name]) <= tolerance for name in a.terms)
    torch.testing.assert_close(grad_a, grad_b, rtol=0, atol=tolerance)
    assert grad_a.abs().max() > 1e-3, "there is something to compare"


def padded(batch, more):
    """The same rows with `more` positions of rubbish behind them."""

    def widen(name, x):
        if x.dim() == 1:
            return x
        if name == "ids":
            return torch.cat([x, torch.full((len(x), more), VOCABULARY - 1)], dim=1)
        if name == "roles":
            return torch.nn.functional.pad(x, (0, more), value=int(Role.PAD))
        if name == "verdicts":
            return torch.nn.functional.pad(x, (0, more), value=int(Verdict.PADDING))
        return torch.nn.functional.pad(x, (0, more), value=float("nan"))

    return dataclasses.replace(batch, **{name: widen(name, x) for name, x in batch.tensors()})


@pytest.mark.parametrize("case", CASES)
def test_padding_and_row_order_do_not_change_loss_or_gradient(case):
    batch = scripted_batch()
    plain = stepped(batch, case)
    same(plain, stepped(padded(batch, 5), case))
    order = torch.tensor([6, 3, 0, 5, 1, 4, 2])
    same(plain, stepped(batch.rows(order), case))


@pytest.mark.parametrize("case", CASES)
def test_no_cut_into_micro_batches_changes_loss_or_gradient(case):
    batch = scripted_batch()
    plain = stepped(batch, case)
    for budget in (1, 13, 27, 40):
        same(plain, stepped(batch, case, budget=budget))


def test_rows_in_which_nothing_trains_are_not_computed(monkeypatch):
    batch, seen = scripted_batch(), []
    silent = batch.verdicts.clone()
    silent[1:4] = torch.where(silent[1:4] == Verdict.TRAINED, int(Verdict.FLAT_GROUP), silent[1:4])
    batch = dataclasses.replace(batch, verdicts=silent)
    plain = PolicyModel.forward

    def forward(self, ids, wanted, **how):
        seen.append(len(ids))
        return plain(self, ids, wanted, **how)

    monkeypatch.setattr(PolicyModel, "forward", forward)
    result, _ = stepped(batch)
    assert seen == [int(trained(batch).any(dim=1).sum())]
    assert seen[0] < len(batch.ids)
    assert result.outputs.logprobs.shape == batch.ids.shape
    assert not result.outputs.logprobs[1:4].any()


@pytest.mark.parametrize("case", ["grpo", "ppo_shared"])
def test_the_heads_chunks_do_not_change_loss_or_gradient(case, monkeypatch):
    plain = stepped(scripted_batch(), case)
    for chunk in (1, 5, 11):
        monkeypatch.setattr(logprobs, "_chunk_for", lambda weight, chunk=chunk: chunk)
        same(plain, stepped(scripted_batch(), case))


def by_hand(batch, options, critic):
    """The loss through all logits of transformers, reduced by `aggregate`; its gradient is autograd's."""
    module = small_policy(critic=critic)
    mask = trained(batch)
    out = module.model.model(input_ids=batch.ids).last_hidden_state
    scores = (module.model.lm_head(out) / 0.7).log_softmax(-1)[:, :-1]
    chosen = torch.nn.functional.pad(scores.gather(-1, batch.ids[:, 1:, None])[..., 0], (1, 0))
    spread = torch.nn.functional.pad(-(scores.exp() * scores).sum(-1), (1, 0))
    how = {"mode": options.aggregate}
    policy = losses.ppo_clip(chosen, batch.old_logprobs, batch.advantages, mask, clip_low=0.2, clip_high=0.2)
    kl = kl_estimate(chosen, batch.ref_logprobs, mask, kind="k3", straight_through=True)
    terms = {
        "policy": aggregate(policy, mask, **how),
        "kl": aggregate(kl, mask, **how),
        "entropy": aggregate(spread, mask, mode="token-mean"),
    }
    total = terms["policy"] + 0.1 * terms["kl"] - 0.05 * terms["entropy"]
    if critic != "none":
        value = module.value_head.values(out) if critic == "shared" else module.critic(batch.ids)
        error = losses.value_clip(value, batch.values, batch.returns, mask, clip=0.2)
        terms["value"] = aggregate(error, mask, mode="token-mean")
        total = total + 0.5 * terms["value"]
    total.backward()
    return terms, total, gradient(module)


@pytest.mark.parametrize("case", ["grpo", "ppo_shared", "ppo_separate"])
def test_a_step_equals_autograd_through_all_logits(case):
    batch = scripted_batch()
    terms, total, expected = by_hand(batch, *CASES[case])
    result, found = stepped(batch, case, budget=20)
    assert result.terms == pytest.approx({name: t.item() for name, t in terms.items()}, abs=1e-10)
    assert result.loss == pytest.approx(total.item(), abs=1e-10)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_contributions_and_terms_add_up_to_the_loss(case):
    batch = scripted_batch()
    result, _ = stepped(batch, case, budget=20, record=True)
    coefs = {"policy": 1.0, "kl": 0.1, "entropy": -0.05, "value": 0.5}
    assert sum(coefs[name] * term for name, term in result.terms.items()) == pytest.approx(result.loss, abs=1e-12)
    for name, contribution in result.contributions.items():
        assert float(contribution.sum()) == pytest.approx(coefs[name] * result.terms[name], abs=1e-12)
        assert not contribution[~trained(batch)].any()


@pytest.mark.parametrize("episodes", [None, torch.tensor([4, 4, 4, 0, 1, 0, 2])], ids=["rows", "episodes"])
@pytest.mark.parametrize("mode", MODES)
def test_a_term_of_ones_is_the_count_its_mode_divides_by(mode, episodes):
    """Numerator and denominator use the same set: a mean of ones is 1, a sum of ones the number of its positions.

    Rows of one episode are one sequence, also where they come in different micro-batches.
    """
    batch = dataclasses.replace(scripted_batch(), episodes=episodes)
    mask = trained(batch)
    sequences = set((torch.arange(7) if episodes is None else episodes)[mask.any(dim=1)].tolist())
    norm = 9.0 if mode == "seq-mean-token-sum-norm" else None

    def ones(out, part):
        values = torch.ones_like(out.logprobs) + 0 * out.logprobs
        return {"ones": Term(values=values, mask=trained(part), mode=mode, norm=norm)}

    result = updater(small_policy(), token_budget=20).step(batch, ones, temperature=1.0)
    per_row = mask.sum().item() / len(sequences)
    expected = {
        "token-mean": 1,
        "seq-mean-token-mean": 1,
        "token-sum": mask.sum().item(),
        "seq-mean-token-sum": per_row,
        "seq-mean-token-sum-norm": per_row / 9,
    }
    assert result.terms["ones"] == pytest.approx(expected[mode], abs=1e-12)


def test_a_mask_that_depends_on_the_outputs_is_refused():
    def picky(out, batch):
        return {"policy": Term(values=out.logprobs, mask=trained(batch) & (out.logprobs > -3), mode="token-mean")}

    with pytest.raises(ValueError, match="never on the outputs"):
        updater(small_policy()).step(scripted_batch(), picky, temperature=1.0)


def test_a_mask_outside_the_trained_positions_is_refused():
    def greedy(out, batch):
        return {"policy": Term(values=out.logprobs, mask=batch.roles != Role.PAD, mode="token-mean")}

    with pytest.raises(ValueError, match="not TRAINED"):
        updater(small_policy()).step(scripted_batch(), greedy, temperature=1.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("case", CASES)
def test_untrained_positions_may_hold_anything(case, bad):
    batch = dataclasses.replace(scripted_batch(), weights=torch.full(scripted_batch().ids.shape, 0.5).double())
    mask = trained(batch)
    fields = ("old_logprobs", "ref_logprobs", "values", "returns", "advantages", "weights", "behaviour_logprobs")
    spoilt = {name: torch.where(mask, getattr(batch, name), bad) for name in fields}
    same(stepped(batch, case, budget=20), stepped(dataclasses.replace(batch, **spoilt), case, budget=20), 0)


@pytest.mark.parametrize("case", CASES)
def test_untrained_tokens_get_no_gradient_of_their_own(case):
    """Changing the advantage of one untrained row changes nothing; changing a trained one does."""
    batch = scripted_batch()
    other = batch.advantages.clone()
    other[2] = 100.0  # its reward failed
    same(stepped(batch, case), stepped(dataclasses.replace(batch, advantages=other), case), 0)
    other[0, trained(batch)[0].nonzero()[0]] += 1.0
    assert stepped(dataclasses.replace(batch, advantages=other), case)[0].loss != stepped(batch, case)[0].loss


def weights(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def test_nothing_to_train_is_no_step_though_there_is_momentum():
    module = small_policy()
    step = updater(module, lr=0.1)
    batch = scripted_batch()
    before = weights(module)
    assert not step.step(batch, loss_of(), temperature=1.0).skipped
    moved = weights(module)
    assert any(not torch.equal(before[name], moved[name]) for name in before)
    assert step.optimizer.state_dict()["state"], "there is momentum"
    untrained = dataclasses.replace(batch, verdicts=torch.full_like(batch.verdicts, Verdict.REWARD_FAILED))
    result = step.step(untrained, loss_of(), temperature=1.0)
    assert (result.loss, result.grad_norm, result.skipped, dict(result.terms)) == (0.0, 0.0, False, {})
    assert not any(torch.stack(list(result.outputs[:2])).flatten())
    assert result.outputs.logprobs.shape == batch.ids.shape
    assert all(torch.equal(moved[name], p) for name, p in module.named_parameters())


def spoilt_loss(value, grad):
    """A loss whose value and gradient are not finite, as asked, at the first trained position of row 0."""

    def loss(out, batch):
        values = out.logprobs
        factor = torch.where(batch.ids == 5, grad, 1.0)
        values = values * factor + torch.where(batch.ids == 5, value, 0.0)
        return {"policy": Term(values=values, mask=trained(batch), mode="token-mean")}

    return loss


@pytest.mark.parametrize(
    ("value", "grad"),
    [(float("inf"), 1.0), (float("nan"), 1.0), (0.0, float("inf")), (0.0, float("nan"))],
)
def test_a_loss_or_gradient_that_is_not_finite_skips_the_step_and_names_the_row(value, grad, caplog):
    batch = scripted_batch()
    at = tuple(trained(batch).nonzero()[3].tolist())
    ids = torch.where(batch.ids == 5, 6, batch.ids)
    ids[at] = 5
    module = small_policy()
    step = updater(module, lr=0.1, norm=1.0)
    step.step(batch, loss_of(), temperature=1.0)
    before, momentum = weights(module), step.optimizer.state_dict()
    result = step.step(dataclasses.replace(batch, ids=ids), spoilt_loss(value, grad), temperature=1.0)
    assert result.skipped
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())
    assert list(result.bad_rows) == [at[0]]
    step.log_skipped(4, result, [f"row {row}" for row in range(len(batch))])
    # The loss has a gradient wherever its value is multiplied; a constant that is added has none.
    bad = "the loss" if grad == 1.0 else "the gradient of model.model.embed_tokens.weight"
    assert caplog.messages == [f"step 4 was skipped: {bad} is not finite; the loss is not in row {at[0]}"]
    after = step.optimizer.state_dict()["state"]
    for index, state in momentum["state"].items():
        assert torch.equal(state["momentum_buffer"], after[index]["momentum_buffer"])
    assert not step.step(batch, loss_of(), temperature=1.0).skipped, "the next step is free of it"


def test_more_bad_rows_than_a_line_can_name_are_counted(caplog):
    step = updater(small_policy())
    result, _ = stepped(scripted_batch())
    for count, said in ((8, "0, 1, 2, 3, 4, 5, 6, 7"), (10, "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"), (0, None)):
        bad = dataclasses.replace(result, bad_rows=range(count))
        step.log_skipped(4, bad, [str(row) for row in range(count)])
        blamed = f"; the loss is not in {said}" if said else ""
        assert caplog.messages[-1] == f"step 4 was skipped: something on another process is not finite{blamed}"


def test_how_far_a_step_is_is_told_by_its_micro_batches():
    class Watching(Quiet):
        def advance(self, done, total, unit):
            seen.append((done, total, unit))

    seen, module = [], small_policy()
    step = updater(module, token_budget=20)
    step.timer = Timer(watcher=Watching())
    step.step(scripted_batch(), loss_of(), temperature=1.0)
    count = len(seen) - 1
    assert seen == [(done, count, "micro-batches") for done in range(count + 1)]
    assert count > 2


def test_the_gradient_is_clipped_to_the_norm_and_the_norm_before_it_reported():
    module = small_policy()
    free, _ = stepped(scripted_batch())
    result = updater(module, norm=0.01).step(scripted_batch(), loss_of(), temperature=0.7)
    assert result.grad_norm == pytest.approx(free.grad_norm, rel=1e-12)
    assert float(gradient(module).norm()) == pytest.approx(0.01, rel=1e-3)


def test_outputs_come_back_in_the_order_of_the_rows():
    batch = scripted_batch()
    result, _ = stepped(batch, "ppo_shared", budget=20)
    whole, _ = stepped(batch, "ppo_shared")
    for mine, other in zip(result.outputs[:3], whole.outputs[:3], strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
        assert not mine[~trained(batch)].any()
        assert mine[trained(batch)].any()
