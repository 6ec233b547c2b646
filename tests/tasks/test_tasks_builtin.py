"""The built-in tasks: deterministic, held out, exact, and not to be fooled."""

import re
import time
from fractions import Fraction
from operator import add, mul, sub, truediv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.rewards import RewardPool, Sample
from rolecall.tasks import RowError, demonstrations, find_task, kind_of, preference_rows, resolve
from rolecall.tasks.expressions import NotArithmetic, parse_expression

NAMES = [
    "addition",
    "addition:digits=1",
    "addition:digits=5",
    "sorting:length=3",
    "reversal",
    "countdown",
    "countdown:numbers=4,largest=20",
]


def content(prompt):
    """A problem apart from the order of its parts."""
    return "".join(sorted(prompt))


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_deterministic_different_and_held_out(name):
    task = find_task(name)
    train, test = (list(task.rows(split, n=300, seed=3)) for split in ("train", "test"))
    assert train == list(task.rows("train", n=300, seed=3))
    assert train[:50] == list(task.rows("train", n=50, seed=3)), "asking for fewer gives the first ones"
    assert len({row["prompt"] for row in train}) == len(train)
    assert train[:5] != list(task.rows("train", n=5, seed=4))
    for seed in range(3):
        other = task.rows("test", n=300, seed=seed)
        assert not {row["prompt"] for row in train} & {row["prompt"] for row in other}
    assert test
    assert kind_of(task.rows("train", n=1)) == "prompt"


@pytest.mark.parametrize("name", ["addition:digits=1", "sorting:length=3"])
def test_problems_that_differ_in_order_only_are_on_one_side(name):
    task = find_task(name)
    train, test = ({content(row["prompt"]) for row in task.rows(s, n=10_000)} for s in ("train", "test"))
    assert test
    assert not train & test


def test_a_small_task_is_given_whole():
    task = find_task("addition:digits=1")
    prompts = [row["prompt"] for split in ("train", "test") for row in task.rows(split, n=10_000)]
    assert sorted(prompts) == sorted(f"{a}+{b}=" for a in range(10) for b in range(10))


@pytest.mark.parametrize("name", NAMES)
def test_gold_answers_score_one_and_spoilt_ones_nothing(name):
    task = find_task(name)
    for row in demonstrations(task, "train", n=100):
        assert task.score(row["completion"], row) == 1.0
        assert task.score(f" {row['completion']}\n", row) == 1.0
        assert task.score("", row) == 0.0
    pairs = preference_rows(task, "train", n=100)
    assert kind_of(pairs) == "preference"
    assert list(pairs) == list(preference_rows(task, "train", n=100))
    for row in pairs:
        assert [task.score(row["chosen"], row), task.score(row["rejected"], row)] == [1.0, 0.0]
        assert row["rejected"]


def test_what_the_prompts_look_like():
    looks = {
        "addition": r"^\d+\+\d+=$",
        "sorting": r"^sort \d{5}=$",
        "reversal": r"^reverse [a-z]{5}=$",
        "countdown": r"^make \d+ of \d \d \d=$",
    }
    for name, look in looks.items():
        assert all(re.match(look, row["prompt"]) for row in find_task(name).rows("test", n=20))


COUNTDOWN = {"prompt": "make 24 of 2 4 8=", "answer": "(8-2)*4"}


@pytest.mark.parametrize("answer", ["(8-2)*4", "4*(8-2)", " ( 8 - 2 ) * 4 ", "((8-2))*4"])
def test_countdown_takes_any_right_expression(answer):
    assert find_task("countdown").score(answer, COUNTDOWN) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "24",
        "8*4-2",
        "(8-2)*4*1",
        "4*8-8",
        "(8-2)*4=24",
        "(8-2)*4 # right",
        "(8-2)*4;",
        "__import__('os').system('true')",
        "9**9**9",
        "2**4+8",
        "2//4",
        "8/(2-2)*4",
        "(8-2)*٤",
        "(8-2)*4²",
        "(8-2)×4",
        "(8-2)\n*4",
        "-2+8*4",
        "8-2 4",
        "()",
        ")(",
        "(",
        "(8-2*4",
        "(8-2))*4",
        "8 2 4",
        "8-+2*4",
        "0x18",
        "1e1",
        "lambda: 24",
        "\x00",
        "9" * 1_000_000,
        "(" * 1_000_000 + "1" + ")" * 1_000_000,
        "1+" * 500_000 + "1",
        "1/" * 90 + "1",
        "(" * 99 + "1" + ")" * 99,
    ],
    ids=lambda answer: ascii(answer[:20]),
)
def test_countdown_is_not_fooled_and_never_slow(answer):
    start = time.monotonic()
    assert find_task("countdown").score(answer, COUNTDOWN) == 0.0
    assert time.monotonic() - start < 0.5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2+3*4", 14),
        ("2*3+4", 10),
        ("8-3-2", 3),
        ("8/4/2", 1),
        ("7/2*2", 7),
        ("2-(3-4)*5", 7),
        ("1/3+1/6", Fraction(1, 2)),
    ],
)
def test_expressions_bind_as_in_school(text, value):
    assert parse_expression(text)[0] == value


def combined(left, sign, right):
    if None in (left[1], right[1]) or (sign == "/" and not right[1]):
        value = None
    else:
        value = {"+": add, "-": sub, "*": mul, "/": truediv}[sign](left[1], right[1])
    return f"({left[0]}{sign}{right[0]})", value


NUMBERS = st.integers(0, 99).map(lambda number: (str(number), Fraction(number)))


@given(st.recursive(NUMBERS, lambda inner: st.builds(combined, inner, st.sampled_from("+-*/"), inner), max_leaves=12))
def test_expressions_are_exact(expression):
    text, value = expression
    if value is None:
        with pytest.raises(NotArithmetic, match="division by zero"):
            parse_expression(text)
    else:
        assert parse_expression(text)[0] == value


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("adition", "no task, file or folder 'adition'; did you mean 'addition'"),
        ("xyzzy", "tasks are addition, sorting, reversal, countdown, calculator, guessing, kuhn and rg:"),
        ("addition:digit=3", "task addition has no option `digit`; did you mean `digits`"),
        ("addition:foo=3", "it has digits"),
        ("addition:digits", "options are written option=value"),
        ("addition:digits=x", "`digits` must be a whole number, got 'x'"),
        ("addition:digits=1.5", "must be a whole number"),
        ("addition:digits=true", "must be a whole number"),
        ("addition:digits=0", "digits must lie in 1 to 18, got 0"),
        ("countdown:numbers=99", "numbers must lie in 2 to 8, got 99"),
        ("data/rows.jsonl", "there is no file or folder data/rows.jsonl"),
    ],
)
def test_a_name_that_does_not_work_is_a_sentence(name, sentence):
    with pytest.raises(RowError, match=sentence):
        resolve(name)


def test_a_task_knows_its_two_splits_only():
    with pytest.raises(RowError, match="the splits 'train' and 'test', not 'dev'"):
        find_task("addition").rows("dev", n=1)
    with pytest.raises(RowError, match="no task 'sortin'; did you mean 'sorting'"):
        find_task("sortin")


def test_resolve_gives_tasks_and_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n')
    assert resolve("addition:digits=3").name == "addition:digits=3"
    assert resolve("countdown").name == "countdown:numbers=3,largest=9"
    assert resolve(str(path))[0] == {"prompt": "a"}


def test_the_reward_of_a_task_runs_in_a_pool():
    tasks = [find_task("addition"), find_task("countdown")]
    rows = [row for task in tasks for row in task.rows("test", n=3)]
    samples = [Sample(prompt=row["prompt"], completion=row["answer"], row=row) for row in rows]
    wrong = [Sample(prompt=row["prompt"], completion="0", row=row) for row in rows]
    with RewardPool(tasks[0].reward) as pool:
        scored = pool.score([*samples, *wrong, Sample(prompt="p", completion="c")])
    assert [s.total for s in scored] == [1.0] * 6 + [0.0] * 6 + [None]
    assert scored[-1].failure is None
