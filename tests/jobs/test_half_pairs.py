"""Half of a surrogate pair, which JSON can hold and no tokenizer can read."""

import pytest

from rolecall.config.parts import ChatOptions
from rolecall.jobs.data import check_prompts
from rolecall.policy.load import load
from rolecall.tasks.rows import ListRows, RowError

HALF = "a\ud800b"


@pytest.mark.parametrize(
    "row",
    [{"prompt": HALF}, {"prompt": [{"role": "user", "content": HALF}]}],
    ids=["text", "messages"],
)
def test_it_is_refused_with_its_row_before_any_work(row):
    good = {"prompt": "ab"} if isinstance(row["prompt"], str) else {"prompt": [{"role": "user", "content": "ab"}]}
    with pytest.raises(RowError, match=r"row 1: the prompt cannot be given to the model: it holds U\+D800, half of a"):
        check_prompts(ListRows([good, row]), load("tiny"), ChatOptions())
