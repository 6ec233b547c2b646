"""Parts of the audit that need no model, or one made for the purpose; and its page in the documentation."""

import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import rolecall
from rolecall.policy.tiny import byte_characters
from rolecall.recipes.audit import Finding, Level, without_consequences
from rolecall.recipes.audit.records import encoded, is_text, quoted, share

DOC = Path(__file__).parents[2] / "docs" / "audit.md"
QUICK = {"groups": 2, "samples": 2, "sampling.max_new_tokens": 4}


def finding(check, level):
    return Finding(check=check, level=Level(level), summary=f"{check} is {level}", evidence=("7",), advice="do")


def levels(*findings):
    return {f.check: f.level for f in without_consequences(findings)}


def test_a_warning_that_may_follow_from_an_error_is_not_judged():
    found = without_consequences([finding("stop-ids", "error"), finding("truncation", "warning")])
    assert found[1].level is Level.SKIPPED
    assert found[1].summary == "not judged before stop-ids is put right: truncation is warning"
    assert found[1].evidence == ("7",)


@pytest.mark.parametrize(
    ("cause", "follower", "stays"),
    [
        (("stop-ids", "warning"), ("truncation", "warning"), "warning"),  # only an error explains it away
        (("stop-ids", "error"), ("truncation", "error"), "error"),  # an error is never taken back
        (("stop-ids", "error"), ("duplicates", "warning"), "warning"),  # nor what has another cause
        (("stop-ids", "error"), ("truncation", "ok"), "ok"),
    ],
)
def test_other_findings_stay(cause, follower, stays):
    assert levels(finding(*cause), finding(*follower))[follower[0]] == stays


def bpe_model(directory):
    """A random model whose tokenizer merges a space with the digit behind it."""
    letters = byte_characters()
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    merges = [(letters[32], str(digit)) for digit in range(10)]
    vocabulary |= {f"{letters[32]}{digit}": 256 + digit for digit in range(10)} | {"</s>": 266}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", model_max_length=64)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=266,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    fast.save_pretrained(directory)
    return str(directory)


def test_a_prompt_whose_last_token_merges_with_the_answer(tmp_path):
    model = bpe_model(tmp_path / "model")
    spaced = [{"prompt": f"{i} and 1 is ", "answer": str(i + 1)} for i in range(8)]
    found = rolecall.audit(model=model, rows=spaced, reward="exact", **QUICK)["seam"]
    assert found.level is Level.WARNING
    assert "8 of 8 (100%) prompts end in a token that would merge" in found.summary
    assert "ends in ' ' (32); with its answer there stands ' 1' (257)" in found.evidence[0]
    tight = [{"prompt": row["prompt"].rstrip(), "answer": f" {row['answer']}"} for row in spaced]
    assert rolecall.audit(model=model, rows=tight, reward="exact", **QUICK)["seam"].level is Level.OK


def test_ids_that_the_tokenizer_does_not_have(tmp_path):
    found = rolecall.audit(
        model=bpe_model(tmp_path / "model"),
        rows=[{"prompt": "1 is", "answer": "1"}],
        reward="exact",
        **QUICK | {"samples": 8, "sampling.max_new_tokens": 16},
    )["vocabulary"]
    assert found.level is Level.WARNING
    assert "ids that the tokenizer does not have" in found.summary
    assert "300 rows in the head, 267 tokens" in found.evidence[0]


def test_tokens_that_are_text_and_such_that_are_not(tmp_path):
    bpe_model(tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    assert is_text(tokenizer, 49)
    assert not is_text(tokenizer, 266)
    assert not is_text(tokenizer, 299), "no token at all"
    assert encoded(tokenizer, "1 2") == (49, 258)
    assert encoded(tokenizer, "\ud800") is None


def test_a_share_of_nothing():
    assert share(0, 0) == "0 of 0 (0%)"


def test_a_long_text_is_cut_to_a_line():
    assert quoted("a" * 60) == repr("a" * 60)
    assert quoted("a" * 61) == repr("a" * 59 + "…")


def test_every_check_is_documented_and_nothing_else(tmp_path):
    rl = rolecall.audit(**QUICK)
    sft = rolecall.audit(job="sft", rows=[{"prompt": "1", "completion": "2"}])
    made = {f.check for f in (*rl.findings, *sft.findings)}
    table = DOC.read_text().partition("## The checks")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)) == made
    with pytest.raises(KeyError, match="no check 'gould' was made"):
        rl["gould"]


def test_the_snippets_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (snippet,) = re.findall(r"^```python\n(.*?)^```", DOC.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(snippet, str(DOC), "exec"), {"__name__": "__main__"})
    assert "nothing to learn from" in capsys.readouterr().out


def test_verdicts_are_those_that_training_would_give():
    found = rolecall.audit(**QUICK | {"algorithm.drop_truncated": True, "algorithm.drop_flat": True, "show": 4})
    cut = [sample for sample in found.samples if sample.note.startswith("length")]
    assert cut
    assert {"GIVEN", "TRUNCATED"} == set(cut[0].verdicts)
    assert cut[0].reasons["TRUNCATED"].startswith("Truncated: the answer was cut off")
    assert cut[0].roles.count("CONTENT") == 4
    assert cut[0].logprobs[0] is None
    assert cut[0].logprobs[-1] < 0
