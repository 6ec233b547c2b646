"""Which curves a run has, and how they are drawn."""

import re
from math import inf, nan

from rolecall.look.charts import Chart, Series, charts
from rolecall.look.curves import curve_cards, in_words
from rolecall.look.png import write_png


def steps(**columns):
    return [
        {"step": i + 1, **dict(zip(columns, row, strict=True))}
        for i, row in enumerate(zip(*columns.values(), strict=True))
    ]


def by_title(found):
    return {chart.title: chart for chart in found}


def test_the_reward_is_shown_by_part_where_there_are_several():
    lines = steps(**{"reward": [1, 2], "rewards/a/mean": [0, 1], "rewards/b/mean": [1, 1]})
    main, rest = charts(lines, [], [])
    assert [s.label for s in by_title(main)["Reward"].series] == ["total", "a", "b"]
    assert rest == []
    alone = charts(steps(**{"reward": [1, 2], "rewards/a/mean": [0, 1]}), [], [])[0]
    assert [s.label for s in by_title(alone)["Reward"].series] == ["total"]


def test_a_number_nobody_knows_has_a_chart_of_its_own():
    main, rest = charts(steps(loss=[1.0, 2.0], mine=[3, 4], words=["a", "b"]), [], [])
    assert [chart.title for chart in main] == ["Loss"]
    assert [chart.title for chart in rest] == ["mine"]


def test_what_is_no_number_is_a_gap():
    (chart,) = charts(steps(loss=[1.0, nan, inf, 2.0]), [], [])[0]
    assert chart.series[0].ys == [1.0, None, None, 2.0]
    html, _ = curve_cards("c", [chart])
    assert not re.search(r"\bnan\b|\binf\b", html)
    assert len(re.findall(r"<circle", html)) == 2


def test_phases_are_parts_that_add_up_to_the_step():
    line = {"step": 1, "step_time": 10.0, "collect": 6.0, "generate": 3.0, "reward": 1.0, "score": 1.0, "update": 4.0}
    chart = by_title(charts([], [], [line | {"sync": 0.5}])[0])["Time by phase"]
    parts = {s.label: s.ys[0] for s in chart.series}
    assert parts == {"generate": 3.0, "reward": 1.0, "score": 1.0, "rest of collect": 1.0, "update": 3.5, "sync": 0.5}
    assert sum(parts.values()) == line["step_time"]


def test_held_out_numbers_have_curves_once_there_are_two():
    once = [{"step": 0, "eval_reward": 0.5}]
    assert charts(steps(loss=[1]), once, [])[0][0].title == "Loss"
    assert charts(steps(loss=[1]), [*once, {"step": 3, "eval_reward": 0.7}], [])[0][0].title == "Evaluated reward"


def test_a_chart_in_words():
    chart = Chart(name="r", title="Reward", about="", xs=[1, 2, 3], series=[Series(label="total", ys=[1.0, 0.5, 2.0])])
    assert in_words(chart) == "Reward: total goes from 1 at step 1 to 2 at step 3, between 0.5 and 2."


def test_a_long_run_keeps_its_extremes_and_its_ends():
    values = [0.0] * 5000
    values[1234], values[4321] = 9.0, -9.0
    chart = Chart(name="r", title="r", about="", xs=list(range(5000)), series=[Series(label="r", ys=values)])
    _, data = curve_cards("c", [chart])
    held = data.value["c-0"]
    assert len(held["xs"]) <= 402
    assert (held["xs"][0], held["xs"][-1]) == (0, 4999)
    assert (max(held["series"][0]["ys"]), min(held["series"][0]["ys"])) == (9.0, -9.0)


def test_one_step_and_a_constant_are_drawn(tmp_path):
    main, _ = charts(steps(loss=[0.5], entropy=[0.0]), [], [{"step": 1, "generate": 1.0}])
    html, _ = curve_cards("c", main)
    assert html.count("<circle") == 2
    assert "<polygon" in html
    assert [path.name for path in write_png(main, tmp_path)] == ["loss.png", "entropy.png", "time.png"]


def test_labels_are_text():
    chart = Chart(name="x", title="<b>", about="", xs=[1], series=[Series(label="</svg><script>", ys=[1.0])])
    html, _ = curve_cards("c", [chart])
    assert "<b>" not in html.replace("<b>1</b>", "")
    assert "<script>" not in html


def test_numbers_that_never_change_are_listed_and_not_drawn():
    main, rest = charts(steps(loss=[1.0, 1.0], entropy=[1.0, 2.0], mine=[3.0, 3.0], gone=[None, 4.0]), [], [])
    drawn, data = curve_cards("x", [*main, *rest])
    assert [title for title in ("Loss", "Entropy", "mine", "gone") if f"<h4>{title}</h4>" in drawn] == ["Entropy"]
    assert "Numbers that never changed (3)" in drawn
    assert "<dt>mine</dt><dd>3</dd>" in drawn
    assert len(data.value) == 1
    assert "<h4>Loss</h4>" in curve_cards("x", main, always=1)[0], "the first is shown whatever it does"
    assert "<h4>Loss</h4>" in curve_cards("x", charts(steps(loss=[1.0]), [], [])[0])[0], "one step is no flat line"


def test_accuracy_is_explained_but_not_as_that_of_pairs():
    evaluations = [{"step": i, "eval_accuracy": i / 4} for i in range(3)]
    for pairs in (False, True):
        (chart,) = charts([], evaluations, [], pairs=pairs)[0]
        assert ("share of greedy answers that score 1 or more" in chart.about) != pairs
