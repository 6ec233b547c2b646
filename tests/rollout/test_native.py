"""The native engine's own promises: prompts computed once, rows that leave, conversations, weights, streams."""

import pytest
import torch
from small_models import CONTEXT, STOP, gaps, native, prompt, ragged_requests, small_model

from rolecall.rollout.engine import weights_hash
from rolecall.rollout.stops import StopRule
from rolecall.types import Finish, Request, Sampling


@pytest.fixture(scope="module")
def model():
    return small_model("llama-biases")


@pytest.fixture
def engine(model):
    return native(model, max_rows=4)


class Counted:
    """Counts what a decoder is asked to do."""

    def __init__(self, engine):
        decoder = engine._decoder
        self.prefills: list[tuple[int, int]] = []
        self.steps: list[int] = []
        prefill, go_on, step = decoder.prefill, decoder.go_on, decoder.step

        def counted_prefill(ids):
            self.prefills.append(tuple(ids.shape))
            return prefill(ids)

        def counted_go_on(ids, pasts):
            self.prefills.extend((1, len(x)) for x in ids)
            return go_on(ids, pasts)

        def counted_step(tokens, lengths, cache):
            self.steps.append(len(tokens))
            return step(tokens, lengths, cache)

        decoder.prefill, decoder.go_on, decoder.step = counted_prefill, counted_go_on, counted_step


def test_a_prompt_is_prefilled_once_however_many_its_samples(engine):
    counted = Counted(engine)
    (request,) = ragged_requests((9,), n=11, stop_ids=(), max_new_tokens=5)
    completions = engine.generate([request])
    assert counted.prefills == [(1, 9)]
    assert len({c.ids for c in completions}) > 5  # samples of their own


def test_prompts_that_enter_together_are_prefilled_together(engine):
    counted = Counted(engine)
    engine.generate(ragged_requests((9, 3, 5), n=1, max_new_tokens=3))
    assert counted.prefills == [(3, 9)]


def test_rows_that_finish_leave_and_waiting_ones_enter(engine):
    counted = Counted(engine)
    lengths = [2, 9, 3, 6, 4, 1, 7]
    requests = [
        Request(prompt_ids=prompt(3 + i), sampling=Sampling(max_new_tokens=new, stop_ids=()), prompt=i)
        for i, new in enumerate(lengths)
    ]
    completions = engine.generate(requests)
    assert [len(c.ids) for c in completions] == lengths
    # The first token of an answer comes from its prompt, every other one costs one row of one step: nothing else.
    assert sum(counted.steps) == sum(lengths) - len(lengths)
    assert max(counted.steps) == 4


def test_answers_come_as_they_end(engine):
    news = [9, 2, 5, 12]
    requests = [
        Request(prompt_ids=prompt(4), sampling=Sampling(max_new_tokens=new, stop_ids=()), prompt=i)
        for i, new in enumerate(news)
    ]
    assert [c.prompt for c in engine.stream(requests)] == [1, 2, 0, 3]


def test_a_stream_left_half_way_does_no_harm(model, engine):
    requests = ragged_requests()
    expected = native(model, max_rows=4).generate(requests)
    stream = engine.stream(requests)
    next(stream)
    stream.close()
    assert engine.generate(requests) == expected


def test_streams_may_be_read_by_turns(model, engine):
    ones, others = ragged_requests(n=2), ragged_requests((7, 2), n=3)
    expected = native(model, max_rows=4).generate(others)
    found = []
    for completion in engine.stream(ones):
        found.append(completion)
        assert engine.generate(others) == expected
    fresh = list(native(model, max_rows=4).stream(ones))
    assert found == fresh


def test_loading_while_answers_grow_is_refused(model, engine):
    requests = [
        Request(prompt_ids=prompt(4), sampling=Sampling(max_new_tokens=new, stop_ids=()), prompt=i)
        for i, new in enumerate([2, 20])
    ]
    stream = engine.stream(requests)
    assert next(stream).policy_version == 0
    engine.load(dict(model.named_parameters()), 1)
    with pytest.raises(RuntimeError, match="new weights were loaded while answers"):
        next(stream)
    assert {c.policy_version for c in engine.generate(requests)} == {1}


def turns(model, engine, *, count=3):
    """A conversation: each prompt is all that was said, plus four tokens from outside."""
    said = prompt(10)
    for turn in range(count):
        request = Request(
            prompt_ids=said, sampling=Sampling(max_new_tokens=8, stop_ids=()), prompt=turn, conversation="talk"
        )
        (completion,) = engine.generate([request])
        yield request, completion
        said = (*said, *completion.ids, *prompt(4, start=turn))


def test_a_turn_pays_for_its_new_tokens_only(model, engine):
    counted = Counted(engine)
    for request, completion in turns(model, engine):
        (fresh,) = native(model).generate([request])
        assert completion.ids == fresh.ids
        torch.testing.assert_close(
            torch.tensor(completion.behaviour_logprobs), torch.tensor(fresh.behaviour_logprobs), atol=2e-5, rtol=0
        )
        assert float(gaps(model, [request], [completion]).max()) < 1e-4
    # The last token of an answer was drawn but never fed: it is new with the next turn.
    assert counted.prefills == [(1, 10), (1, 5), (1, 5)]


@pytest.mark.parametrize("shared", [0, 1, 9, 13])
def test_a_conversation_with_another_past_reuses_what_is_the_same(model, engine, shared):
    sampling = Sampling(max_new_tokens=8, stop_ids=())
    (first,) = engine.generate([Request(prompt_ids=prompt(10), sampling=sampling, conversation="talk")])
    said = (*prompt(10), *first.ids)
    changed = (*said[:shared], (said[shared] + 1) % 256, 1, 2, 3, 4, 5)
    counted = Counted(engine)
    request = Request(prompt_ids=changed, sampling=sampling, prompt=1, conversation="talk")
    (second,) = engine.generate([request])
    assert counted.prefills == [(1, 6)]
    assert second.ids == native(model).generate([request])[0].ids


def test_a_prompt_that_is_wholly_cached_feeds_its_last_token_again(model, engine):
    sampling = Sampling(max_new_tokens=8, stop_ids=())
    engine.generate([Request(prompt_ids=prompt(10), sampling=sampling, conversation="talk")])
    counted = Counted(engine)
    request = Request(prompt_ids=prompt(10), sampling=sampling, prompt=1, conversation="talk")
    assert engine.generate([request])[0].ids == native(model).generate([request])[0].ids
    assert counted.prefills == [(1, 1)]


def test_conversations_are_forgotten_when_they_take_too_much_room(model):
    counting = native(model, max_rows=2)
    per_token = counting._decoder.bytes_per_token()
    engine = native(model, max_rows=2, cache_bytes=per_token * 30)
    sampling = Sampling(max_new_tokens=4, stop_ids=())
    for name in ("a", "b", "c"):  # 13 tokens each
        engine.generate([Request(prompt_ids=prompt(10), sampling=sampling, conversation=name)])
    assert list(engine._conversations) == ["b", "c"]


def test_a_small_cache_takes_fewer_rows_at_a_time(model):
    engine = native(model, max_rows=64)
    tight = native(model, max_rows=64, cache_bytes=engine._decoder.bytes_per_token() * 21 * 3)
    counted = Counted(tight)
    (request,) = ragged_requests((5,), n=7, stop_ids=())
    assert [c.ids for c in tight.generate([request])] == [c.ids for c in engine.generate([request])]
    assert max(counted.steps) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_takes_the_trainers_weights(model, dtype):
    engine = native(model, dtype=dtype)
    trained = small_model("llama-biases", seed=1)
    weights = dict(trained.named_parameters())
    old_hash, old = engine.hash(), engine.generate(ragged_requests())
    assert old_hash == weights_hash(dict(model.named_parameters()), dtype)
    assert old_hash != weights_hash(weights, dtype)  # not loaded, and it shows
    engine.load(weights, 7)
    assert engine.version == 7
    assert engine.hash() == weights_hash(weights, dtype)
    new = engine.generate(ragged_requests())
    assert {c.policy_version for c in new} == {7}
    assert [c.ids for c in new] != [c.ids for c in old]
    assert new == native(trained, dtype=dtype, version=7).generate(ragged_requests())


def test_released_weights_are_asked_for_and_come_back(model, engine):
    request = [Request(prompt_ids=(5, 6, 7), sampling=Sampling(max_new_tokens=5), n=3)]
    before = engine.generate(request)
    engine.release()
    with pytest.raises(RuntimeError, match="released; load some"):
        engine.generate(request)
    engine.load(dict(model.named_parameters()), engine.version)
    assert engine.generate(request) == before


def test_what_is_loaded_is_a_copy():
    trained = small_model()
    engine = native(trained)
    before = engine.generate(ragged_requests())
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(1.0)
    assert engine.generate(ragged_requests()) == before
    assert engine.hash() != weights_hash(dict(trained.named_parameters()), torch.float32)


def test_load_drops_conversations(model, engine):
    counted = Counted(engine)
    conversation = turns(model, engine, count=2)
    next(conversation)
    engine.load(dict(model.named_parameters()), 1)
    next(conversation)
    assert counted.prefills == [(1, 10), (1, 22)]


def test_weights_that_do_not_fit_are_refused_and_nothing_changes(model, engine):
    weights = dict(model.named_parameters())
    before, requests = engine.hash(), ragged_requests()
    expected = engine.generate(requests)
    missing = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing"):
        engine.load(missing, 1)
    with pytest.raises(ValueError, match="has shape"):
        engine.load(weights | {"model.norm.weight": torch.ones(3)}, 1)
    assert (engine.hash(), engine.version) == (before, 0)
    assert engine.generate(requests) == expected


def test_broken_weights_are_named_and_leave_no_trace(model, engine):
    weights = {name: p.detach() for name, p in model.named_parameters()}
    requests = ragged_requests()
    expected = engine.generate(requests)
    broken = weights | {"model.layers.0.self_attn.v_proj.weight": weights["model.layers.0.self_attn.v_proj.weight"] / 0}
    engine.load(broken, 1)
    with pytest.raises(ValueError, match="logits hold NaN or inf"):
        engine.generate(requests)
    engine.load(weights, 0)
    assert engine.generate(requests) == expected


def test_float64_gives_the_same_answers_in_every_batch_shape():
    exact = small_model("qwen3", dtype=torch.float64)
    requests = ragged_requests((5, 1, 30), n=4)
    results = [native(exact, max_rows=rows).generate(requests) for rows in (1, 3, 64)]
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a.ids == b.ids
            assert max(abs(x - y) for x, y in zip(a.behaviour_logprobs, b.behaviour_logprobs, strict=True)) < 1e-11


def test_an_answer_may_fill_the_context_to_the_last_token(model, engine):
    for length in (CONTEXT - 1, CONTEXT - 3):
        request = Request(prompt_ids=prompt(length), sampling=Sampling(max_new_tokens=50, stop_ids=()))
        (completion,) = engine.generate([request])
        assert (len(completion.ids), completion.finish) == (CONTEXT - length, Finish.LENGTH)


class Words:
    """A tokenizer of given pieces of bytes."""

    def __init__(self, *pieces):
        self.pieces = [p.encode() if isinstance(p, str) else p for p in pieces]

    def decode(self, ids, **_):
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def ends(rule, ids):
    """Index of the token with which the answer ends, and why."""
    for i in range(len(ids)):
        if (finish := rule.finish(ids[: i + 1], full=False)) is not None:
            return i, finish
    return None


def rule(tokenizer, *strings, stop_ids=(), **settings):
    return StopRule.of(Sampling(stop_strings=strings, **settings), stop_ids, tokenizer)


def test_stop_strings_may_span_tokens_and_lie_within_one():
    words = Words("a", "</", "ans", "wer", ">", "x</answer> y")
    assert ends(rule(words, "</answer>"), [0, 1, 2, 3, 4, 0]) == (4, Finish.STOP_STRING)
    assert ends(rule(words, "</answer>"), [0, 5, 0]) == (1, Finish.STOP_STRING)
    assert ends(rule(words, "</answer>"), [1, 2, 3, 0, 4]) is None
    assert ends(rule(words, "zzz", "ans"), [0, 1, 2]) == (2, Finish.STOP_STRING)


def test_stop_strings_may_be_characters_of_several_bytes():
    euro = "€".encode()
    words = Words(euro[:1], euro[1:2], euro[2:], "a", "é")
    assert ends(rule(words, "€"), [3, 0, 1, 2, 3]) == (3, Finish.STOP_STRING)
    assert ends(rule(words, "€"), [3, 0, 1, 3]) is None
    assert ends(rule(words, "aé€"), [1, 2, 0, 3, 4, 0, 1, 2]) == (7, Finish.STOP_STRING)


def test_a_long_stop_string_of_short_tokens_is_seen_far_into_an_answer():
    words = Words(*"abcdefghij")
    string = "abcdefghij" * 4
    ids = [9] * 100 + [i % 10 for i in range(40)]
    assert ends(rule(words, string), ids) == (139, Finish.STOP_STRING)


def test_a_stop_id_comes_before_a_stop_string_and_both_before_length():
    words = Words("a", "b")
    both = rule(words, "b", stop_ids=(1,), max_new_tokens=2)
    assert ends(both, [0, 1]) == (1, Finish.STOP)
    assert ends(rule(words, "b", max_new_tokens=2), [0, 1]) == (1, Finish.STOP_STRING)
    assert ends(rule(words, max_new_tokens=2), [0, 1]) == (1, Finish.LENGTH)
    assert rule(words).finish([0], full=True) is Finish.LENGTH


def test_a_requests_stop_ids_replace_the_models():
    assert rule(None, stop_ids=(4, 5)).stop_ids == {4, 5}
    assert StopRule.of(Sampling(stop_ids=(6,)), (4, 5), None).stop_ids == {6}
    assert StopRule.of(Sampling(stop_ids=()), (4, 5), None).stop_ids == frozenset()


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(ValueError, match="stop_strings need a tokenizer"):
        rule(None, "x")


def test_the_models_own_stop_ids_are_the_default(model):
    requests = ragged_requests((5, 9), n=8, temperature=5.0, max_new_tokens=30)
    completions = native(model, stop_ids=(STOP, *range(100, 130))).generate(requests)
    stopped = [c for c in completions if c.finish is Finish.STOP]
    assert len({c.ids[-1] for c in stopped}) > 1
    assert all(c.ids[-1] in (STOP, *range(100, 130)) for c in stopped)
    assert not any(token in range(100, 130) for c in completions for token in c.ids[:-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_unlike_settings_are_drawn_each_by_its_own(dtype):
    engine = native(small_model(dtype=dtype))
    requests = [
        Request(prompt_ids=prompt(6), sampling=Sampling(max_new_tokens=8, temperature=t, top_k=k), prompt=i)
        for i, (t, k) in enumerate([(1.0, None), (0.0, None), (0.7, 5)])
    ]
    for together, request in zip(engine.generate(requests), requests, strict=True):
        (alone,) = engine.generate([request])
        assert together.ids == alone.ids
        assert together.behaviour_logprobs == pytest.approx(alone.behaviour_logprobs, abs=1e-5)
