"""One thing wrong at a time: the audit finds that, with evidence, and nothing else."""

from dataclasses import dataclass

import audit_rewards as rewards
import pytest
from audit_setups import chat_sums, smol_tokenizer, sums, with_generation_config, with_tokenizer, with_weights
from tokenizers import normalizers, processors

import rolecall
from rolecall.policy.tiny import tiny_tokenizer
from rolecall.recipes.audit import Level
from rolecall.train.progress import Quiet

BASE = {"sampling.max_new_tokens": 12, "samples": 8}


def audit(**settings):
    return rolecall.audit(**{"rows": sums(), "reward": rewards.right} | BASE | settings)


def only(found, check, level):
    """The one finding that is a problem, which has evidence and says what to change."""
    problems = [f"{f.check}: {f.level}: {f.summary} {f.evidence}" for f in (*found.errors, *found.warnings)]
    assert [f.check for f in (*found.errors, *found.warnings)] == [check], problems
    finding = found[check]
    assert finding.level == level
    assert finding.evidence
    assert finding.advice
    return " ".join((finding.summary, *finding.evidence, finding.advice))


# -- one setting is wrong -----------------------------------------------------------------------------------------------

LONG = [row | {"answer": f"the sum is {row['answer']}"} for row in sums()]
WORDS = [row | {"answer": "no number"} for row in sums()]
PLANTED = {
    "own stop ids leave out the model's": ({"sampling.stop_ids": (257,)}, "stop-ids", "error",
        ["the model writes '<|im_end|>' (258) and goes on"]),
    "a row longer than the context": ({"rows": [*sums(), {"prompt": "1" * 1100 + "+1=", "answer": "2"}]}, "context", "error",
        ["1 of 41 (2%) prompts fill the model's context of 1024 tokens", "row 40: 1103 tokens"]),
    "no room for an answer": ({"rows": [*sums(), {"prompt": "1" * 1010 + "+1=", "answer": "2"}]}, "context", "warning",
        ["row 40: 1013 tokens of 1024, which leaves 11"]),
    "a prompt that cannot be put": ({"rows": [*sums(), {"prompt": "", "answer": "2"}]}, "prompts", "error",
        ["row 40: the prompt is empty"]),
    "right answers longer than answers may be": ({"rows": LONG}, "truncation", "error",
        ["are longer than max_new_tokens=12"]),
    "rows that stand twice": ({"rows": [*sums(), *sums(4)]}, "duplicates", "warning", ["4 of 44 (9%) rows repeat"]),
    "rows with two answers": ({"rows": [*sums(), sums(1)[0] | {"answer": "no"}]}, "duplicates", "warning",
        ["occur twice with different answers"]),
    "gold scored wrong": ({"reward": rewards.one_too_many}, "gold", "error",
        ["scores no more than one that says nothing in 8 of 8"]),
    "gold without the full reward": ({"rows": WORDS, "reward": ["exact", "number"]}, "gold", "error",
        ["does not get the full reward of 2 in 8 of 8 (100%) rows"]),
    "a reward for the form only": ({"reward": rewards.a_number}, "gold", "warning",
        ["another row's answer scores as much as the right one"]),
    "a reward without being right": ({"reward": rewards.short}, "gold", "warning",
        ["a sampled answer scores 2, more than the right answer's 1"]),
    "a nondeterministic reward": ({"reward": rewards.noisy}, "determinism", "warning",
        ["64 of 64 (100%) answers scored differently the second time"]),
    "a slow reward": ({"reward": rewards.slow, "groups": 6}, "latency", "warning",
        ["ms per answer, longer than sampling takes"]),
    "a reward that fails": ({"reward": rewards.fragile}, "reward", "warning",
        ["an answer that says nothing has no score in 8 of 8 (100%) rows", "invalid literal for int()"]),
    "flat groups": ({"rows": "addition:digits=4", "reward": None}, "groups", "warning",
        ["8 of 8 (100%) groups are flat; rewards from 0 to 0", "SFT"]),
    "a part of the vocabulary": ({"sampling.top_p": 0.9, "sampling.logprobs": "full"}, "sampling", "warning", ["top_p=0.9"]),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "check", "level", "parts"), PLANTED.values(), ids=PLANTED)
def test_what_is_wrong_is_found(tiny_model, settings, check, level, parts):
    said = only(audit(model=tiny_model, **settings), check, level)
    for part in parts:
        assert part in said


# -- stop ids -----------------------------------------------------------------------------------------------------------


def ends_with_pad(tokenizer):
    tokenizer.eos_token = "<|pad|>"
    return tokenizer


def test_a_template_that_ends_turns_with_no_stop_id(chat_model, tmp_path):
    tokenizer = ends_with_pad(smol_tokenizer())
    tokenizer.pad_token = "<|pad|>"
    other = with_tokenizer(chat_model, tmp_path / "a", tokenizer)
    model = with_generation_config(other, tmp_path / "b", eos_token_id=256)
    said = only(audit(model=model, rows=chat_sums(), reward=rewards.right_in_chat), "stop-ids", "error")
    assert "the chat template ends a turn with '<|im_end|>' (258), which does not end an answer" in said
    assert "answers end at '<|pad|>' (256)" in said
    assert "--sampling.stop_ids 258" in said


def test_a_model_that_stops_with_another_id(tiny_model, tmp_path):
    other = with_tokenizer(tiny_model, tmp_path / "a", ends_with_pad(tiny_tokenizer()))
    model = with_generation_config(other, tmp_path / "b", eos_token_id=256)
    said = only(audit(model=model), "stop-ids", "error")
    assert "the model writes '<|im_end|>' (258) and goes on" in said
    assert "64 of 64 (100%) answers, of which 64 ran to the length limit" in said


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ([258, ord("1")], "declare '1' (49) a stop id, which is ordinary text"),
        ([258, 9999], "stop id 9999 is not a token of this model"),
    ],
)
def test_stop_ids_that_are_no_ends(tiny_model, tmp_path, declared, said):
    model = with_generation_config(tiny_model, tmp_path / "model", eos_token_id=declared)
    assert said in only(audit(model=model), "stop-ids", "error")


def test_own_stop_ids_where_the_pad_is_the_end(chat_model):
    said = only(chat(chat_model, **{"sampling.stop_ids": (257,)}), "stop-ids", "error")
    assert "'<|im_end|>' (258)" in said


def test_tokenizer_and_generation_config_that_disagree(tiny_model, tmp_path):
    model = with_generation_config(tiny_model, tmp_path / "model", eos_token_id=257)
    said = only(audit(model=model), "stop-ids", "warning")
    assert "disagree: '<|im_end|>' (258) against '<|im_start|>' (257)" in said


# -- padding and vocabulary ---------------------------------------------------------------------------------------------


def test_a_pad_token_that_is_sampled(tiny_model, tmp_path):
    def write_pad(model):
        rows = model.get_input_embeddings().weight.data
        rows[256] = 0.97 * rows[ord("1")]

    said = only(audit(model=with_weights(tiny_model, tmp_path / "model", write_pad)), "padding", "warning")
    assert "the model writes the pad token '<|pad|>' (256)" in said
    assert "of 64" in said


def test_a_pad_token_that_is_text(tiny_model, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "1"
    said = only(audit(model=with_tokenizer(tiny_model, tmp_path / "model", tokenizer)), "padding", "error")
    assert "the pad token is '1' (49), which is ordinary text" in said
    assert "of '111' a reward reads ''" in said


def test_a_stop_token_without_a_learned_embedding(chat_model, tmp_path):
    def forget(model):
        head = model.get_output_embeddings().weight.data.clone()
        model.config.tie_word_embeddings = False
        model.set_output_embeddings(type(model.lm_head)(head.shape[1], head.shape[0], bias=False))
        model.lm_head.weight.data = head
        model.get_input_embeddings().weight.data[258] = 0.0

    said = only(audit(model=with_weights(chat_model, tmp_path / "model", forget)), "vocabulary", "warning")
    assert "the embedding of the stop id '<|im_end|>' (258) was never trained" in said


# -- the chat template --------------------------------------------------------------------------------------------------


def chat(model, **settings):
    return audit(**{"model": model, "rows": chat_sums(), "reward": rewards.right_in_chat} | settings)


def test_messages_without_a_template(chat_model, tmp_path):
    tokenizer = smol_tokenizer()
    tokenizer.chat_template = None
    found = chat(with_tokenizer(chat_model, tmp_path / "model", tokenizer))
    assert "the model has no chat template" in only(found, "template", "error")
    assert found["groups"].level is Level.SKIPPED
    assert found["gold"].level is Level.OK, "the reward can be judged without a template"


def test_a_template_that_rewrites_history(chat_model, tmp_path):
    tokenizer = smol_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content'] +", "(message['content'] if loop.last else message['content'].split('</think>')[-1]) +"
    )
    said = only(chat(with_tokenizer(chat_model, tmp_path / "model", tokenizer)), "history", "warning")
    assert "rewrites history" in said
    assert "First thought" in said


def test_a_template_that_opens_no_answer(chat_model, tmp_path):
    tokenizer = smol_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.partition("{% if add_generation_prompt")[0]
    found = chat(with_tokenizer(chat_model, tmp_path / "model", tokenizer))
    assert found["template"].level is Level.WARNING
    assert "opens no answer" in found["template"].summary


def test_options_that_the_template_does_not_know(chat_model):
    said = only(chat(chat_model, chat={"chat_template_kwargs": {"enable_thinkin": False}}), "template", "warning")
    assert "does not know `enable_thinkin`" in said


def test_a_system_prompt_that_plain_text_ignores(tiny_model):
    found = audit(model=tiny_model, chat={"system_prompt": "Be brief."})
    assert [f.check for f in (*found.errors, *found.warnings)] == ["template"]
    assert "chat.system_prompt has no effect" in found["template"].summary


def test_a_template_that_writes_the_start_token_twice(chat_model, tmp_path):
    tokenizer = smol_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    said = only(chat(with_tokenizer(chat_model, tmp_path / "model", tokenizer)), "bos", "error")
    assert "the chat template writes it twice" in said
    assert "'<|im_start|>' (257), '<|im_start|>' (257), 's' (115)" in said


def test_prompts_that_begin_with_the_start_token_the_tokenizer_adds(tiny_model, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 257)]
    )
    rows = [row | {"prompt": f"<|im_start|>{row['prompt']}"} for row in sums()]
    found = audit(model=with_tokenizer(tiny_model, tmp_path / "model", tokenizer), rows=rows)
    assert "the tokenizer adds it to text that has it" in only(found, "bos", "error")


# -- rows ---------------------------------------------------------------------------------------------------------------


def test_held_out_rows_that_are_trained_on(tiny_model):
    rows = [row | {"prompt": prompt} for row in sums() for prompt in (row["prompt"], f"{row['prompt']} ")]
    found = audit(model=tiny_model, rows=rows, eval={"every": 1, "held_out": 0.3})
    assert found["held-out"].level is Level.WARNING
    assert "are also trained on, but for case and spaces" in found["held-out"].summary


def test_a_tokenizer_that_does_not_give_back_what_it_reads(tiny_model, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    rows = [{"prompt": row["prompt"], "answer": f"Sum {row['answer']}"} for row in sums()]
    found = audit(model=with_tokenizer(tiny_model, tmp_path / "model", tokenizer), rows=rows)
    said = only(found, "round-trip", "error")
    assert "comes back as 'sum " in said
    assert "the model cannot write it" in said


def test_stop_strings_that_right_answers_hold(tiny_model):
    found = audit(model=tiny_model, **{"sampling.stop_strings": ("1",)})
    assert "right answers hold '1', at which an answer ends" in found["stop-in-answer"].summary
    assert found["stop-in-answer"].level is Level.WARNING


# -- the reward ---------------------------------------------------------------------------------------------------------


def test_a_reward_that_never_fires(tiny_model):
    found = audit(model=tiny_model, reward=rewards.never)
    assert "never fires: right, wrong and sampled answers all score 0" in only(found, "gold", "error")
    assert "not judged before gold is put right" in found["groups"].summary


def test_a_right_answer_that_the_reward_wants_in_a_form_of_its_own(tiny_model):
    said = only(audit(model=tiny_model, reward=rewards.in_words), "gold", "error")
    assert "all score 0" in said
    assert "--gold_form" in said
    found = audit(model=tiny_model, reward=rewards.in_words, gold_form="It is {}!")
    assert "in gold_form" in found["gold"].evidence[0]
    assert only(found, "groups", "warning")
    shown = [row | {"completion": f"It is {row['answer']}!"} for row in sums()]
    found = audit(model=tiny_model, reward=rewards.in_words, rows=shown)
    assert "as the row's completion" in found["gold"].evidence[0]


def test_a_reward_model_has_opinions_only(tiny_model, tmp_path):
    judge = rolecall.rm(
        model=tiny_model, rows="addition:digits=1", steps=1, batch=2, out=str(tmp_path / "rm"), progress=Quiet()
    )
    found = audit(model=tiny_model, reward=str(judge.path))
    assert found["gold"].level in (Level.OK, Level.WARNING)
    assert not found.errors
    assert found["determinism"].level is Level.OK


def test_a_reward_that_does_not_apply(tiny_model):
    found = audit(model=tiny_model, reward=rewards.sometimes_none)
    assert found["reward"].problem
    assert "does not apply" in found["reward"].summary


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (rewards.needs_level, "reward `needs_level` asks for `level`, but the rows have no such column (answer)"),
        (rewards.too_few, "reward `too_few` returned 1 rewards for 64 answers"),
    ],
)
def test_a_reward_that_cannot_be_used(tiny_model, reward, said):
    found = audit(model=tiny_model, reward=reward)
    assert said in only(found, "reward", "error")
    assert found["determinism"].level is Level.SKIPPED


# -- the first step -----------------------------------------------------------------------------------------------------


def test_differences_that_are_scaled_up_from_next_to_nothing(tiny_model):
    said = only(audit(model=tiny_model, reward=rewards.shaped), "groups", "warning")
    assert "scores differ by next to nothing, and grpo scales" in said
    unscaled = audit(model=tiny_model, reward=rewards.shaped, algorithm={"scale": "none"})
    assert unscaled["groups"].level is Level.OK


def test_answers_that_are_compared_over_the_batch(tiny_model):
    assert audit(model=tiny_model, preset="reinforce", samples=1)["groups"].level is Level.OK
    hard = audit(model=tiny_model, preset="reinforce", samples=1, rows="addition:digits=4", reward=None)
    assert "the answers of the batch score the same" in only(hard, "groups", "warning")


def test_a_fresh_model_is_warned_of_but_no_error():
    found = audit(model="tiny")
    assert not found.errors
    assert {"groups", "round-trip", "truncation"} <= {f.check for f in found.warnings}
    assert "bytes that are not a character" in found["round-trip"].summary


# -- demonstrations -----------------------------------------------------------------------------------------------------


@dataclass
class Demos:
    rows: list
    check: str
    level: str
    said: str


@pytest.mark.parametrize(
    "planted",
    [
        Demos([{"prompt": "1+1=", "completion": "2" * 90}, {"prompt": "1+2=", "completion": "3"}], "context", "warning",
              "1 of 2 (50%) rows are longer than 64 tokens"),
        Demos([{"prompt": "1+1=", "completion": ""}, {"prompt": "1+2=", "completion": "3"}], "trained-tokens", "warning",
              "nothing trains in 1 of 2 (50%) rows"),
        Demos([{"prompt": "1+1=", "completion": "2"}] * 2, "duplicates", "warning", "row 1 repeats row 0"),
        Demos([{"prompt": "1+1=", "completion": None}, {"prompt": "1+2=", "completion": "3"}], "prompts", "error",
              "row 0: `completion` must be a text"),
    ],
    ids=lambda planted: planted.check,
)  # fmt: skip
def test_demonstrations_with_something_wrong(tiny_model, planted):
    found = rolecall.audit(job="sft", model=tiny_model, rows=planted.rows, max_length=64)
    assert planted.said in only(found, planted.check, planted.level)


def test_demonstrations_whose_history_the_template_rewrites(chat_model, tmp_path):
    tokenizer = smol_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content'] +", "(message['content'] if loop.last else message['content'].split('</think>')[-1]) +"
    )
    thought = {"role": "assistant", "content": "<think>x</think>2"}
    question = {"role": "user", "content": "1+1="}
    model = with_tokenizer(chat_model, tmp_path / "model", tokenizer)
    found = rolecall.audit(job="sft", model=model, rows=[{"messages": [question, thought, question, thought]}])
    assert {f.check for f in found.warnings} == {"history", "prompts"}
