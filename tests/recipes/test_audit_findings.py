"""Whole findings: audits of a scripted model with a judge in the same process, down to every number, row and advice."""

from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest

from rolecall.config.audit import AuditOptions
from rolecall.errors import UserError
from rolecall.jobs.arguments import options_of
from rolecall.maths.roles import Verdict
from rolecall.policy.load import load
from rolecall.policy.tiny import tiny_tokenizer
from rolecall.recipes.audit import Level, Setup, Subject, TokenSample, audit_demonstrations, audit_rl, rollout
from rolecall.recipes.rendering import rendered_row
from rolecall.rewards.records import Scored
from rolecall.rollout.scripted import ScriptedEngine
from rolecall.tasks.rows import ListRows

STOP = 258
POLICY = load("tiny")


def sums(n=3):
    """`0+1=` is 1, `1+1=` is 2, …"""
    return [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(n)]


class Judge:
    """Scores what `judge(text, row, call)` says: a number, None, or why it failed. A call scores many answers."""

    names = ("right",)
    pids = ()

    def __init__(self, judge):
        self.judge, self.calls = judge, 0

    def score(self, samples, *, state=None):
        self.calls += 1
        said = [self.judge(self.text(s.completion), s.row, self.calls) for s in samples]
        return [
            Scored(scores={}, total=None, failure=x) if isinstance(x, str) else Scored(scores={}, total=x) for x in said
        ]

    @staticmethod
    def text(completion):
        return completion if isinstance(completion, str) else completion[0]["content"]


class Opinion(Judge):
    """As a reward model is one: not made of functions."""

    pids = property(lambda self: (_ for _ in ()).throw(AttributeError))


def exactly(text, row, call):
    return float(text == row["answer"])


def audit(
    monkeypatch,
    judge=exactly,
    *,
    rows=None,
    answers=("right", "no", "never"),
    reward=Judge,
    times=(0.5, 0.5),
    logprob=-1.0,
    policy=POLICY,
    problem="",
    fields=None,
    preset="grpo",
    **settings,
):
    """Of rows that are each answered with these texts, cut to 5 tokens; "right" stands for the row's own answer.

    `times`: seconds of sampling and of scoring.
    """
    rows = sums() if rows is None else rows
    defaults = {"samples": len(answers), "prompts": 4, "sampling.max_new_tokens": 5}
    options = options_of(AuditOptions, defaults | settings, base=preset)
    clock = iter([0.0, times[0], 10.0, 10.0 + times[1]])
    monkeypatch.setattr(rollout, "perf_counter", lambda: next(clock))

    def script(request, sample):
        said = policy.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        row = next((row for row in rows if Judge.text(row["prompt"]) in said), rows[0])
        answer = answers[sample]
        if not isinstance(answer, str):
            return answer
        text = row["answer"] if answer == "right" else answer
        return (*text.encode(errors="replace"), STOP)

    setup = Setup(
        options=options,
        policy=policy,
        rows=ListRows(rows),
        engine=ScriptedEngine(script, stop_ids=policy.stop_ids, logprobs=lambda request, ids: [logprob] * len(ids)),
        reward=reward(judge),
        gold=lambda row: row["answer"],
        groups=len(rows),
    )
    return audit_rl(replace(setup, **fields or {}), about={"model": "scripted"}, problem=problem)


def whole(finding):
    advice = [f"-> {finding.advice}"] if finding.advice else []
    return "\n".join([f"{finding.check}: {finding.level}: {finding.summary}", *finding.evidence, *advice])


def problems(found):
    return [whole(f) for f in found.findings if f.problem]


def unscored(*texts):
    """None for these texts."""
    return lambda text, row, call: None if text in texts else exactly(text, row, call)


def failing(*texts):
    return lambda text, row, call: f"cannot read {text!r}" if text in texts else exactly(text, row, call)


def but_for(answer, score):
    """Another score for the right answer of the row with this one."""
    return lambda text, row, call: score if row["answer"] == text == answer else exactly(text, row, call)


def blind_to(answer):
    """Fails on all but the empty answer to one row when right and wrong answers are tried, which is the third call."""

    def judge(text, row, call):
        return f"cannot read {text!r}" if row["answer"] == answer and call == 3 and text else exactly(text, row, call)

    return judge


def extra(text, score, *, only=None, second=0.0):
    """Something more for one text, and still more the second time."""

    def judge(said, row, call):
        more = score + second * (call == 2) if said == text and only in (None, row["answer"]) else 0.0
        return exactly(said, row, call) + more

    return judge


def only_once(judge):
    return lambda text, row, call: None if call == 2 else judge(text, row, call)


def refused(calls):
    def judge(text, row, call):
        if call in calls:
            raise UserError("two rewards for nine answers")
        return exactly(text, row, call)

    return judge


def noisy(text, row, call):
    second = {"no": None, "never": 0.25}.get(text, 0.5 if row["answer"] == "2" else 1.0)
    return second if call == 2 else exactly(text, row, call)


def mostly_large(text, row, call):
    return extra("never", 0.03 if row["answer"] == "1" else 0.5)(text, row, call)


def wants(form):
    return lambda text, row, call: float(text == form.format(row["answer"]))


def chats(n=3, **columns):
    return [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} | columns for row in sums(n)]


def templated(change, **tokens):
    """The model with another chat template, and tokens of other names."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = change(tokenizer.chat_template)
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
    return replace(POLICY, tokenizer=tokenizer, has_chat_template=tokenizer.chat_template is not None)


def raising(template):
    return "{{ raise_exception('no\\n  questions') }}"


def raising_later(template):
    return "{% if messages | length > 2 %}{{ raise_exception('no  more') }}{% endif %}" + template


def forgetful(template):
    said = "message['content']"
    return template.replace(said, f"({said} if loop.last else {said}.split('</think>')[-1])")


def ending(text):
    return lambda template: template.replace("<|im_end|>", text)


def nothing(template):
    return None


def own_template(more="", **options):
    return {"chat.chat_template_kwargs": {"chat_template": tiny_tokenizer().chat_template + more} | options}


def row(prompt, answer="1"):
    return {"prompt": prompt, "answer": answer}


FIVE, FOUR = sums(5), sums(4)
CHAT = {"rows": chats()}
SAID = [row | {"completion": f"It is {row['answer']}!"} for row in sums()]
PAIR = ("no", "never")
MARKED = ("right", (ord("1"), 257, 257, STOP))
CASES = {
    # the reward
    "some answers without a score": {"judge": unscored("no")},
    "half the answers without a score": {"judge": unscored("no"), "answers": ("right", "no")},
    "most answers without a score": {"judge": unscored("no", "never"), "times": (0.5, 4.5)},
    "a reward that fails": {"judge": failing("never", "")},
    "a reward that fails on one of five right answers": {"judge": blind_to("2"), "rows": FIVE},
    "a reward that fails on one of four right answers": {"judge": blind_to("2"), "rows": FOUR},
    "a reward that is known not to work": {"problem": "reward `right` asks for `level`"},
    "a reward that is refused": {"judge": refused({1})},
    "a reward that is refused when it is tried": {"judge": refused({3})},
    # right answers
    "one of five right answers is not the best": {"judge": but_for("3", 0.5), "rows": FIVE, "fields": {"exact": True}},
    "one of four right answers is not the best": {"judge": but_for("3", 0.5), "rows": FOUR, "fields": {"exact": True}},
    "one of four, of a reward that may be shaped": {"judge": but_for("3", 0.5), "rows": FOUR, "show": "gold"},
    "a full reward of two": {"fields": {"exact": True}, "reward_weights": (2.0,)},
    "one of five right answers is worth nothing": {"judge": but_for("3", 0.0), "rows": FIVE},
    "one of four right answers is worth nothing": {"judge": but_for("3", 0.0), "rows": FOUR},
    "one of four in a reward model's opinion": {"judge": but_for("3", 0.0), "rows": FOUR, "reward": Opinion},
    "more for a wrong answer": {"judge": extra("never", 3.0, only="2")},
    "more for a wrong answer, within the noise": {"judge": extra("never", 1.5, only="2", second=0.25)},
    "more for a wrong answer, and no second score": {"judge": only_once(extra("never", 2.0, only="2"))},
    "the same for any number": {"judge": lambda text, row, call: float(text.isdigit())},
    "the same for all": {"judge": lambda text, row, call: 0.25},
    "right only in a common form": {"judge": wants("#### {}"), "show": "gold"},
    "right only in a given form": {"judge": wants("It is {}!"), "fields": {"gold_form": "It is {}!"}, "show": "gold"},
    "right only as demonstrated": {"judge": wants("It is {}!"), "rows": SAID, "show": "gold"},
    "an opinion of a common form": {"judge": wants("#### {}"), "reward": Opinion},
    # twice, and time
    "another score the second time": {"judge": noisy},
    "no score the second time": {"judge": lambda t, row, call: None if call == 2 and t == "no" else exactly(t, row, call)},
    "slow": {"times": (0.5, 4.5)},
    "slow, but less so than sampling": {"times": (4.5, 4.0), "show": "latency"},
    "a second for a step": {"times": (0.0, 0.75), "show": "latency"},
    # groups
    "all wrong": {"answers": ("no", "no")},
    "all right": {"answers": ("right", "right")},
    "ten of eleven groups flat": {"judge": extra("never", 0.5, only="2"), "rows": sums(11), "answers": PAIR},
    "nine of ten groups flat": {"judge": extra("never", 0.5, only="2"), "rows": sums(10), "answers": PAIR, "show": "groups"},
    "one answer each, all wrong": {"preset": "reinforce", "answers": ("no",)},
    "one answer each": {"preset": "reinforce", "answers": ("no",), "judge": extra("no", 0.5, only="2"), "show": "groups"},
    "small differences": {"judge": extra("never", 0.03), "answers": PAIR},
    "differences that are not small": {"judge": extra("never", 0.05), "answers": PAIR, "show": "groups"},
    "small differences in one of three": {"judge": mostly_large, "answers": PAIR},
    "small differences in one of four": {"judge": mostly_large, "answers": PAIR, "rows": FOUR, "show": "groups"},
    "small differences that are noise": {"judge": extra("never", 0.03, second=0.015), "answers": PAIR, "show": "groups"},
    "small differences that are more than noise": {"judge": extra("never", 0.03, second=0.0145), "answers": PAIR},
    "small differences, not scaled": {"judge": extra("never", 0.03), "answers": PAIR, "algorithm.scale": "none"},
    "small differences in rloo": {"preset": "rloo", "judge": extra("never", 0.03), "answers": PAIR},
    # lengths
    "most answers cut": {"answers": ("right", "never", "never")},
    "half the answers cut": {"answers": ("right", "never"), "show": "truncation"},
    "no answer cut": {"answers": ("right", "no"), "show": "truncation"},
    "a right answer that is too long": {"rows": [*sums(2), row("4+1=", "fifty"), row("5+1=", "sixty!"), *sums(3)[2:]]},
    "one too long of twenty": {"rows": [*sums(19), row("40+1=", "fifty one")]},
    "a right answer that just fits": {"rows": [*sums(), row("4+1=", "five")]},
    "a prompt that fills the context": {"rows": [*sums(), row("2" * 1030), row("1" * 1024)]},
    "a prompt that leaves little room": {"rows": [*sums(), row("2" * 1021), row("1" * 1020)]},
    "a prompt that leaves just enough": {"rows": [*sums(), row("1" * 1019)], "show": "context"},
    # how answers are drawn and end
    "a stop id in a right answer": {"rows": [*sums(), row("4+1=", "5<|im_end|>"), row("5+1=", "6")]},
    "stop strings in right answers": {"rows": sums(12), "sampling.stop_strings": ("0", "1"), "sampling.stop_ids": (STOP, ord("5"))},
    "a part of the vocabulary": {"sampling.top_p": 0.9, "sampling.top_k": 20, "sampling.logprobs": "full"},
    "a part of the vocabulary that is recorded": {"sampling.top_p": 0.9, "sampling.logprobs": "drawn", "show": "sampling"},
    "no stop at all": {"sampling.stop_ids": ()},
    "a stop id beyond the head": {"sampling.stop_ids": (STOP, 259)},
    "a stop id below 0": {"sampling.stop_ids": (STOP, -1)},
    "own stop ids": {"sampling.stop_ids": (ord("!"),)},
    "own stop ids beside the model's": {"sampling.stop_ids": (ord("!"), STOP), "show": "stop-ids"},
    "goes on after a special token in a tenth": {"answers": (*MARKED, *["no"] * 8), "logprob": -2.3},
    "goes on after a special token in fewer": {"answers": (*MARKED, *["no"] * 9), "logprob": -2.3},
    "goes on after an unlikely special token": {"answers": (*MARKED, *["no"] * 8), "logprob": -2.31},
    "goes on after two special tokens": {"answers": ((257, 1, 2, 3, 4), (257, 258, 3, 4, 5), (257,) * 5), "sampling.stop_ids": (ord("!"),)},
    "the pad token sampled": {"answers": ("right", (256, 256, STOP), "no")},
    "broken characters in a fifth": {"answers": ("right", (0xC3, STOP), "no", "no", "no"), "show": "round-trip"},
    "broken characters in a third": {"answers": ("right", (0xC3, STOP), "no")},
    # rows
    "prompts that cannot be put": {"rows": [*sums(), row(None), row("")]},
    "prompts that cannot be put beyond those encoded": {"rows": [*sums(70), row("")], "show": "context"},
    "rows that repeat": {"rows": [*sums(), *sums(2)]},
    "rows that contradict": {"rows": [*sums(), sums()[1] | {"answer": "5"}]},
    "trained on what is held out": {"fields": {"held_out": ListRows([{"prompt": " 0+1=\n"}, {"prompt": "9+1="}])}},
    "half a pair of characters": {"rows": [*sums(), row("a+1=", "\ud800")]},
    "no answers": {"fields": {"gold": lambda row: None}},
    "a prompt beyond those encoded that may be long": {"rows": [*sums(70), row("1" * 1004)], "show": "context"},
    "a prompt beyond those encoded that is short": {"rows": [*sums(70), row("1" * 1003)], "show": "context"},
    # conversations
    "conversations": CHAT | {"show": ("template", "history", "stop-ids", "seam", "round-trip", "gold")},
    "no template": CHAT | {"policy": templated(nothing)},
    "a template that raises": CHAT | {"policy": templated(raising)},
    "a template that raises in longer conversations": CHAT | {"policy": templated(raising_later)},
    "a template that opens no answer": CHAT | {"policy": templated(lambda t: t.partition("{% if add_gen")[0])},
    "a template that forgets thoughts": CHAT | {"policy": templated(forgetful)},
    "a template that ends turns in text": CHAT | {"policy": templated(ending("###"))},
    "a template that ends turns in a stop string": CHAT | {"policy": templated(ending("###")), "sampling.stop_strings": ("##",)},
    "a template that ends turns in another token": CHAT | {"policy": templated(ending("<|pad|>"))},
    "an option that no template knows": CHAT | {"chat.chat_template_kwargs": {"enable_thinkin": False}},
    "an option that the template knows": CHAT | {"policy": templated(lambda t: t + "{{ shout }}"), "chat.chat_template_kwargs": {"shout": ""}},
    "a template of one's own": CHAT | {"policy": templated(nothing), **own_template(), "show": ("template", "history", "prompts")},
    "an option that one's own template knows": CHAT | own_template("{{ shout }}", shout="") | {"show": "template"},
    "the start token twice": CHAT | {"policy": templated(lambda t: "{{ bos_token }}" + t, bos_token="<|im_start|>")},
    "the start token once": CHAT | {"policy": templated(str, bos_token="<|im_start|>"), "show": "bos"},
    "the end for padding": CHAT | {"policy": templated(str, pad_token="<|im_end|>"), "show": "padding"},
    "no pad token": CHAT | {"policy": templated(str, pad_token=None), "show": "padding"},
    "another end in the tokenizer": CHAT | {"policy": templated(str, eos_token="<|pad|>")},
    "a template's options for plain text": {"chat.system_prompt": "Be brief.", "chat.chat_template_kwargs": {"thinking": False}},
    "a template's option for plain text": {"chat.chat_template_kwargs": {"thinking": False}},
}  # fmt: skip


def messages(*contents):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def shown(*completions):
    return [{"prompt": f"{i}+1=", "completion": text} for i, text in enumerate(completions)]


DEMONSTRATIONS = {
    "demonstrations": {"rows": [messages("0+1=", "1", "1+1=", "2"), messages("2+1=", "3")]},
    "demonstrations of text": {"rows": shown("1", "2")},
    "demonstrations without the stop": {"rows": shown("1", "2"), "train_stop": False},
    "demonstrations that are too long": {"rows": shown("1" * 40, "2" * 30, "3"), "max_length": 20},
    "one in twenty is too long": {"rows": shown("1" * 17, *map(str, range(2, 21))), "max_length": 20},
    "all are too long": {"rows": shown("1" * 30, "2" * 40), "max_length": 20},
    "empty demonstrations": {"rows": shown("", "2", "")},
    "nothing but empty demonstrations": {"rows": shown("", "")},
    "demonstrations that cannot be rendered": {"rows": [*shown("1", "2"), {"prompt": "2+1=", "completion": None}]},
    "demonstrations that repeat": {"rows": [*shown("1", "2"), *shown("1")]},
    "answers without an end": {"rows": [messages("0+1=", "1")], "policy": templated(ending("#"))},
    "answers without an end that need none": {
        "rows": [messages("0+1=", "1")], "policy": templated(ending("#")), "train_stop": False,
    },
    "answers that the template changes": {
        "rows": [messages("0+1=", "<think>x</think>1", "1+1=", "2")],
        "policy": templated(forgetful),
    },
}  # fmt: skip


def runs(verdicts):
    """`GIVEN 4, TRAINED 2`."""
    return ", ".join(f"{name} {len([*same])}" for name, same in groupby(verdicts))


def demonstrated(*, rows, policy=POLICY, max_length=64, train_stop=True, shown=2):
    subject = Subject(options=options_of(AuditOptions, {"job": "sft"}, base="grpo"), policy=policy, rows=ListRows(rows))
    render = partial(rendered_row, policy=policy, chat=subject.options.chat)
    return audit_demonstrations(subject, render, about={}, max_length=max_length, train_stop=train_stop, shown=shown)


def expected():
    """By case: what `audit_findings.txt` says."""
    parts = (Path(__file__).parent / "audit_findings.txt").read_text().split("== ")
    return {name: rest.strip() for name, _, rest in (part.partition("\n") for part in parts[1:])}


def test_every_case_has_its_findings_written_down():
    assert [*expected()] == ["healthy", *CASES, *DEMONSTRATIONS]


def test_a_healthy_audit_from_start_to_end(monkeypatch):
    found = audit(monkeypatch, fields={"held_out": ListRows([{"prompt": "7+1="}])})
    assert found.about == {"model": "scripted"}
    check("healthy", [whole(f) for f in found.findings])


@pytest.mark.parametrize("case", CASES)
def test_what_is_found(monkeypatch, case):
    """Warnings and errors whole, and which checks could not be made; where there are none, what is said instead."""
    settings = dict(CASES[case])
    show = settings.pop("show", "")
    found = audit(monkeypatch, **settings)
    said = [whole(f) for f in found.findings if f.problem or f.check in ((show,) if isinstance(show, str) else show)]
    said += [
        whole(f) for f in found.findings if f.level is Level.SKIPPED and f.check not in ("history", "held-out", *show)
    ]
    check(case, said)


@pytest.mark.parametrize("case", DEMONSTRATIONS)
def test_what_is_found_in_demonstrations(case):
    found = demonstrated(**DEMONSTRATIONS[case])
    said = [
        whole(f)
        for f in found.findings
        if f.check in ("prompts", "context", "trained-tokens", "duplicates", "round-trip")
    ]
    check(case, said + [f"{s.title}, {s.note}: {runs(s.verdicts)}" for s in found.samples])


def check(case, said):
    assert "\n".join(said) == expected()[case]


SAMPLES = {
    "as they are": ({}, ["TRAINED 2", "TRAINED 3", "TRAINED 5"]),
    "without stops": ({"algorithm.train_stop": False}, ["TRAINED 1, STOP_UNTRAINED 1", "TRAINED 2, STOP_UNTRAINED 1", "TRAINED 5"]),
    "without what was cut": ({"algorithm.drop_truncated": True}, ["TRAINED 2", "TRAINED 3", "TRUNCATED 5"]),
    "without failed rewards": ({"judge": unscored("no")}, ["TRAINED 2", "REWARD_FAILED 3", "TRAINED 5"]),
    "without flat groups": ({"judge": unscored("right"), "algorithm.drop_flat": True, "answers": ("no", "no", "never")}, ["FLAT_GROUP 3", "FLAT_GROUP 3", "FLAT_GROUP 5"]),
    "groups that are not flat": ({"algorithm.drop_flat": True}, ["TRAINED 2", "TRAINED 3", "TRAINED 5"]),
    "flat but for one without a score": ({"judge": unscored("1", "2", "3"), "algorithm.drop_flat": True}, ["REWARD_FAILED 2", "FLAT_GROUP 3", "FLAT_GROUP 5"]),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "verdicts"), SAMPLES.values(), ids=SAMPLES)
def test_samples_token_by_token(monkeypatch, settings, verdicts):
    """The first answers to each prompt, then the second ones; here all of row 2's, whose place in the step is 0."""
    samples = audit(monkeypatch, fields={"shown": 9}, **settings).samples
    assert [s.title for s in samples] == [f"row {row}, answer {i}" for i in range(3) for row in (2, 0, 1)]
    assert [runs(s.verdicts[4:]) for s in samples[::3]] == verdicts
    assert all(s.verdicts[:4] == ("GIVEN",) * 4 for s in samples)


def test_all_that_a_sample_says(monkeypatch):
    (sample,) = audit(monkeypatch, answers=("right", (0xC3, 257, STOP)), fields={"shown": 4}).samples[3:]
    assert sample == TokenSample(
        title="row 2, answer 1",
        note="stop, 3 tokens, reward 0",
        ids=(*b"2+1=", 0xC3, 257, STOP),
        pieces=(b"2", b"+", b"1", b"=", b"\xc3", b"<|im_start|>", b"<|im_end|>"),
        roles=("PROMPT",) * 4 + ("CONTENT",) * 2 + ("STOP",),
        verdicts=("GIVEN",) * 4 + ("TRAINED",) * 3,
        reasons={v: Verdict[v].sentence for v in ("TRAINED", "GIVEN")},
        logprobs=(None,) * 4 + (-1.0,) * 3,
        score=0.0,
    )
    assert sample.tokens[4:] == ("\\xc3", "<|im_start|>", "<|im_end|>")
    (unscored_sample,) = audit(monkeypatch, unscored("3"), fields={"shown": 1}).samples
    assert (unscored_sample.note, unscored_sample.score) == ("stop, 2 tokens, no score", None)
