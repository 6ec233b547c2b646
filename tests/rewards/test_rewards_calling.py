"""What functions are given, where they come from, and what people read when that goes wrong."""

import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from rolecall.config.rewards import RewardProcessOptions
from rolecall.jobs.data import open_reward
from rolecall.rewards import RewardError, RewardPool, Sample, Scored
from rolecall.rewards.calling import inspect_function, text_of
from rolecall.rewards.sources import open_packed, pack
from rolecall.rewards.verifiers import contains, exact, last_number, number
from rolecall.tasks.rows import ListRows

HERE = Path(__file__).parent
CHAT = [{"role": "user", "content": "1+1?"}]


def score(functions, *samples, state=None, **options):
    with RewardPool(functions, workers=1, **options) as pool:
        return pool.score(samples, state=state), pool.take_metrics()


def test_a_trl_function_gets_what_trl_gives():
    def seen(prompts, completions, completion_ids, trainer_state, environments, log_extra, log_metric, **columns):
        log_extra("length", [len(ids) for ids in completion_ids])
        log_metric("share", 0.25)
        assert prompts == ["a", "b"]
        assert completions == ["x", "y"]
        assert completion_ids == [[1, 2], [3]]
        assert columns == {"answer": ["x", None], "level": [None, 3]}
        assert trainer_state.global_step == 5
        assert environments is None
        return [1, None]

    samples = (
        Sample(prompt="a", completion="x", completion_ids=(1, 2), row={"prompt": "a", "answer": "x"}),
        Sample(prompt="b", completion="y", completion_ids=(3,), row={"prompt": "b", "level": 3}),
    )
    (first, second), metrics = score(seen, *samples, state={"global_step": 5})
    assert first == Scored(scores={"seen": 1.0}, total=1.0, extras={"length": 2})
    assert second == Scored(scores={"seen": None}, total=None, extras={"length": 1})
    assert metrics == {"share": 0.25, "rewards/seen/failed": 0.0}


def test_a_trl_function_without_kwargs_gets_only_what_it_names():
    def plain(completions, answer):
        return [float(c[0]["content"] == a) for c, a in zip(completions, answer, strict=True)]

    reply = [{"role": "assistant", "content": "2"}]
    (scored,), _ = score(plain, Sample(prompt=CHAT, completion=reply, row={"answer": "2", "other": 1}))
    assert scored.total == 1.0


def test_a_verl_function_gets_the_rows_ground_truth_and_its_dict_is_kept():
    source = f"{HERE / 'misbehaving.py'}:compute_score"
    row = {"data_source": "gsm", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 1}}
    reply = [{"role": "assistant", "content": "4"}]
    (scored,), _ = score(source, Sample(prompt=CHAT, completion=reply, row=row))
    assert scored == Scored(scores={"compute_score": 4.0}, total=4.0, extras={"source": "gsm", "right": True})


def test_a_dict_without_a_score_is_a_failure():
    (scored,), _ = score(lambda completion: {"reward": 1}, Sample(prompt="q", completion="a"))
    assert "a dict without 'score' (its keys: reward)" in scored.failure


def test_control_characters_of_the_model_do_not_reach_the_log():
    def quotes(completion):
        raise ValueError(completion)

    (scored,), _ = score(quotes, Sample(prompt="q", completion="\x1b[31mred\u202e"))
    assert "ValueError: \\x1b[31mred\\u202e" in scored.failure


def test_environments_reach_the_function_as_copies():
    def moves(completions, environments):
        return [environment["moves"] for environment in environments]

    (scored,), _ = score(moves, Sample(prompt="q", completion="a", environment={"moves": 3}))
    assert scored.total == 3.0


def test_an_environment_that_cannot_travel_is_a_sentence():
    with pytest.raises(RewardError, match="samples cannot be sent to a reward worker"):
        score(lambda completions, environments: [0], Sample(prompt="q", completion="a", environment=sys.stdout))


def test_metrics_are_averaged_over_calls_and_then_forgotten():
    def logs(completion, log_metric):
        log_metric("length", len(completion))
        return 0

    samples = [Sample(prompt="q", completion="a" * n) for n in (1, 2, 6)]
    with RewardPool(logs) as pool:
        pool.score(samples)
        assert pool.take_metrics()["length"] == 3.0
        assert "length" not in pool.take_metrics()


def test_a_missing_column_is_named_at_once():
    with pytest.raises(RewardError, match=r"reward `f` asks for `target`, but the rows have no such column \(answer\)"):
        score({"f": lambda completions, target: [0.0]}, Sample(prompt="q", completion="a", row={"answer": "1"}))


def first(completion, target):
    return 0.0 if target is None else 1.0


def all_of_them(completions, target):
    return [0.0 if t is None else 1.0 for t in target]


@pytest.mark.parametrize("function", [first, all_of_them])
def test_a_row_that_lacks_what_others_have_is_given_none_in_a_round_of_its_own_too(function):
    with RewardPool(function, workers=1) as pool:
        both = [Sample(prompt="q", completion="a", row=row) for row in ({"target": "1"}, {"answer": "2"})]
        assert [s.total for s in pool.score(both)] == [1.0, 0.0]
        assert [s.total for s in pool.score(both[1:])] == [0.0]


def test_rows_that_lack_what_a_reward_asks_for_are_counted_in_one_line(caplog):
    rows = ListRows([{"prompt": "q", "target": "1"}, {"prompt": "q", "target": None}, {"prompt": "q", "answer": "2"}])
    with ExitStack() as stack:
        open_reward([first, "exact"], None, stack, RewardProcessOptions(), rows=rows)
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 3 rows have no `target`, which a reward asks for: it gets None there",
        "2 of 3 rows have no answer, which a reward asks for: it gets None there",
    ]
    caplog.clear()
    with ExitStack() as stack:
        open_reward([first], None, stack, RewardProcessOptions(), rows=ListRows([{"prompt": "q", "target": "1"}]))
    assert not caplog.records


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("exactt", "no built-in reward 'exactt'; did you mean 'exact'"),
        ("nowhere.py:f", "there is no file"),
        (":f", "not of the form"),
        ("no_such_module_at_all:f", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        (f"{HERE / 'misbehaving.py'}:singel", "has no `singel`; did you mean `single`?"),
        (f"{HERE / 'misbehaving.py'}:not_callable", "is a int, not a function"),
        (f"{HERE / 'misbehaving.py'}:not_a_reward", r"has the parameters \(x, y\); it must take `completions`"),
        ([], "no reward function given"),
        (["exact", "exact"], "reward 'exact' is given twice; keep one"),
    ],
)
def test_a_source_that_does_not_work_is_one_sentence(source, sentence):
    with pytest.raises(RewardError, match=sentence) as caught:
        RewardPool(source, workers=1)
    assert "\n" not in str(caught.value)


def test_a_closure_that_cannot_travel_is_a_sentence():
    lock = threading.Lock()
    with pytest.raises(RewardError, match="reward `lambda` cannot be sent to a worker process"):
        pack(lambda completions: [lock.locked()])


def test_a_module_that_dies_when_imported_is_a_sentence(tmp_path):
    (tmp_path / "dies.py").write_text("import os\nos._exit(4)\n")
    with pytest.raises(RewardError, match=r"die before they are called \(the process ended with exit code 4"):
        RewardPool(f"{tmp_path / 'dies.py'}:f")


def test_a_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("VALUE = 4.0\n")
    (tmp_path / "mine.py").write_text("from neighbour_of_mine import VALUE\ndef f(completion): return VALUE\n")
    (scored,), _ = score(f"{tmp_path / 'mine.py'}:f", Sample(prompt="q", completion="a"))
    assert scored.total == 4.0


def test_names_come_from_the_function():
    def mine(completions):
        return [0.0]

    class Judge:
        def __call__(self, completions):
            return [1.0]

    names = [p.name for p in pack([partial(mine), Judge(), "number", "os.path:join"])]
    assert names == ["mine", "Judge", "number", "join"]
    assert open_packed(pack("os.path:join")[0])("a", "b") == "a/b"


def test_wrong_weights_and_sizes_are_sentences():
    with pytest.raises(RewardError, match="2 reward functions need as many weights, got 1"):
        RewardPool(["exact", "number"], weights=[1.0])
    with pytest.raises(RewardError, match="workers >= 1"):
        RewardPool("exact", workers=0)


@pytest.mark.parametrize(
    ("function", "style"),
    [
        (lambda completions, **kwargs: 0, "batch"),
        (lambda prompts, completion_ids: 0, "batch"),
        (lambda **kwargs: 0, "batch"),
        (lambda completion, answer: 0, "sample"),
        (lambda completion_text, completion_ids: 0, "sample"),
        (lambda data_source, solution_str, ground_truth, extra_info=None: 0, "verl"),
    ],
)
def test_the_style_is_told_by_parameter_names(function, style):
    assert inspect_function("f", function).style == style


def test_the_text_of_messages_is_what_the_last_one_says():
    assert text_of("plain") == "plain"
    assert text_of([{"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}]) == "y"
    assert text_of([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}]) == "ab"
    assert text_of([]) == text_of([{"role": "assistant", "content": None}]) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("it is 1,234.50 in all", "1234.50"),
        ("7-3", "3"),
        ("x = -3", "-3"),
        ("(2)-5 or -6.", "-6"),
        ("no number", None),
        ("9" * 100_000, "9" * 100_000),
        ("٣", None),
    ],
)
def test_the_last_number(text, expected):
    found = last_number(text)
    assert (None if found is None else str(found)) == expected


def test_verifiers_compare_with_the_rows_answer():
    verl = {"reward_model": {"ground_truth": "72"}}
    assert [number("so #### 72.0", verl), number("71", verl), number("none", verl)] == [1.0, 0.0, 0.0]
    assert [exact(" 72\n", verl), exact("072", verl)] == [1.0, 0.0]
    assert [contains("the 72nd", verl), contains("7 2", verl)] == [1.0, 0.0]
    assert exact("x", {}) is None
    assert contains("x", {}) is None
    assert number("4", {"answer": "four"}) is None
    assert exact("x", {"solution": "x"}) == 1.0


HOSTILE = [
    "__import__('os').system('touch {marker}')",
    "$__import__('os').system('touch {marker}')$",
    "\\boxed{{__import__('os').system('touch {marker}')}}",
    "$9^{{9^{{9^{{9}}}}}}$",
    "$" + "(" * 20_000 + "1" + ")" * 20_000 + "$",
    "\\boxed{{\\pi}}",
    "$" + "{{" * 5_000,
    "",
]


def test_math_scores_mathematics_and_hostile_text_scores_nothing(tmp_path):
    pytest.importorskip("math_verify")
    marker = tmp_path / "marker"
    texts = ["\\boxed{{\\frac{{1}}{{2}}}}", "the answer is $0.5$", *HOSTILE, "so $\\frac{{2}}{{4}}$"]
    samples = [Sample(prompt="q", completion=t.format(marker=marker), row={"answer": "1/2"}) for t in texts]
    with RewardPool("math", deadline_s=20) as pool:
        scored = pool.score(samples)
    assert [s.total for s in scored[:2]] == [1.0, 1.0]
    assert scored[-1].total == 1.0, "the grader is what it was after hostile text"
    assert all(s.total in (0.0, None) for s in scored[2:-1])
    assert not marker.exists()
