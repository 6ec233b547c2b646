"""Tasks of reasoning-gym, generated here and scored in workers."""

import pytest

pytest.importorskip("reasoning_gym")

from rolecall.rewards import RewardPool, Sample
from rolecall.tasks import RowError, find_task, resolve


def test_rows_are_deterministic_and_held_out():
    task = find_task("rg:chain_sum:min_terms=2,max_terms=2,max_digits=1")
    train, test = (list(task.rows(split, n=60, seed=1)) for split in ("train", "test"))
    assert train == list(task.rows("train", n=60, seed=1))
    assert {"prompt", "answer", "task", "metadata"} == set(train[0])
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    assert find_task(task.name) == task


def test_a_task_with_few_problems_ends():
    task = find_task("rg:chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1")
    sizes = [len(task.rows(split, n=1000)) for split in ("train", "test")]
    assert 100 < sizes[0] < 300
    assert 5 < sizes[1] < 50


def test_scores_come_from_reasoning_gym_in_a_worker():
    task = resolve("rg:chain_sum")
    row = task.rows("train", n=1)[0]
    answers = [row["answer"], f"<think>…</think><answer> {row['answer']} </answer>", "nonsense"]
    with RewardPool(task.reward, workers=1) as pool:
        scored = pool.score([Sample(prompt=row["prompt"], completion=answer, row=row) for answer in answers])
    assert [s.total for s in scored] == [1.0, 1.0, 0.0]
    assert task.gold(row) == row["answer"]


def test_names_and_options_that_do_not_work_are_sentences():
    with pytest.raises(RowError, match="has no task 'chain_sun'; did you mean 'rg:chain_sum'"):
        resolve("rg:chain_sun")
    with pytest.raises(RowError, match="does not take these options"):
        find_task("rg:chain_sum:nonsense=1").rows("train", n=1)
