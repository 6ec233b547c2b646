"""Columns with a meaning elsewhere that a job does not honour: said before training, never dropped in silence."""

import logging
from typing import Literal

from rolecall.tasks.rows import RowError, Rows

_log = logging.getLogger("rolecall")

Job = Literal["sft", "rm", "dpo", "prompts", "episodes"]

_PICTURES = ("images", "image", "videos", "audio")
_TRAINED = {
    "weight": "every row counts the same",
    "weights": "every row counts the same",
    "system": "it is not put before the prompt; make it the first of the messages, or give chat.system_prompt",
    "system_prompt": "it is not put before the prompt; make it the first of the messages, or give chat.system_prompt",
}
_UNUSED: dict[Job, dict[str, str]] = {
    "sft": {**_TRAINED, "label": "all completions are imitated, those labelled false too; leave out the bad ones"},
    "rm": _TRAINED,
    "dpo": {**_TRAINED, "margin": "only `rolecall rm` trains with margins"},
    "prompts": {
        **{name: f"only rewards are given it: {why}" for name, why in _TRAINED.items() if name.startswith("system")},
        **dict.fromkeys(_PICTURES, "only rewards are given it: the model reads text"),
        "environment": "it starts no environment; give --env to play episodes",
        "completions": "rewards are given the sampled answers by that name",
    },
    "episodes": {},
}


def check_columns(rows: Rows, job: Job) -> None:
    """Warn of columns that the job leaves unused; refuse pictures, without which such rows mean something else."""
    first = rows[0]
    filled = [name for name, value in first.items() if value is not None and value != [] and value != ""]
    for name in filled:
        if name in _PICTURES and job in ("sft", "rm", "dpo"):
            raise RowError(
                f"the rows have `{name}`, which {job} cannot show to the model: use rows of text, or drop it"
            )
        if name in _UNUSED[job]:
            _log.warning("the column `%s` is not used to train: %s", name, _UNUSED[job][name])
