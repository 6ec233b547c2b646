"""What a store of rollouts says of itself when it is checked, and what it refuses."""

from dataclasses import replace

import pytest
from test_store import two

from rolecall.experience.parquet import StoreError
from rolecall.experience.store import write_rollouts
from rolecall.experience.stored import RolloutStore, StoreFacts

FITS = {"tokenizer": "t-1", "vocabulary": 9, "temperature": 1.0, "context": 3}


def stored(place, *, totals=((1.0, None), (None, 0.5))) -> RolloutStore:
    """Two steps of two trajectories; the second of each is a demonstration, whose log-probs nobody knows."""
    (place / "rollouts").mkdir(parents=True)
    for step, model, scores in ((12, "m-1", totals[0]), (3, "m-0", totals[1])):
        trajectories, batch, details = two()
        details = [replace(d, total=total) for d, total in zip(details, scores, strict=True)]
        path = place / "rollouts" / f"step-{step:06d}.parquet"
        write_rollouts(path, trajectories, batch, step=step, details=details, model=model, tokenizer="t-1")
    return RolloutStore(place)


def test_a_store_counts_what_it_holds(tmp_path):
    store = stored(tmp_path)
    assert (store.names, len(store)) == (["step-000003.parquet", "step-000012.parquet"], 2)
    assert store.check(**FITS) == StoreFacts(
        steps=2, answers=4, tokens=6, unknown=2, unscored=2, unrecorded=2, models=("m-0", "m-1")
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer": "t-2"}, r"step-000003\.parquet was written with another tokenizer \(t-1, the model's is t-2\)"),
        ({"vocabulary": 8}, r"step-000003\.parquet, row 1: an id lies outside the model's vocabulary of 8"),
        ({"context": 2}, "row 0: 3 tokens do not fit the model's context of 2"),
        ({"temperature": 0.5}, r"row 0 was sampled at temperature 1, .* set sampling\.temperature 1"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_its_place(tmp_path, change, said):
    with pytest.raises(StoreError, match=said):
        stored(tmp_path).check(**FITS | change)


def test_a_store_without_a_score_is_refused(tmp_path):
    with pytest.raises(StoreError, match=r"no answer in .* has a score; apply a reward with `rolecall rescore`"):
        stored(tmp_path, totals=((None, None), (None, None))).check(**FITS)
