"""The columns of a rollouts file, what earlier versions lack, and the columns of an updates file. docs/files.md explains them."""

from dataclasses import replace

import pyarrow as pa

from rolecall.experience.parquet import CODES, FLOATS, IDS, NESTED_IDS, Format, list_of

_TURNS = list_of(
    pa.struct([pa.field("start", pa.int32(), nullable=False), pa.field("end", pa.int32(), nullable=False)])
)
_AUTHORS = list_of(
    pa.struct(
        [
            pa.field("start", pa.int32(), nullable=False),
            pa.field("end", pa.int32(), nullable=False),
            pa.field("author", pa.string(), nullable=False),
        ]
    )
)
_VERSIONS = list_of(pa.struct([pa.field(name, pa.int64(), nullable=False) for name in ("start", "end", "version")]))
PIECES = list_of(pa.binary())
_MESSAGES = list_of(
    pa.struct(
        [
            pa.field("role", pa.string(), nullable=False),
            pa.field("content", pa.string(), nullable=False),
            pa.field("name", pa.string()),
            pa.field("author", pa.string()),
        ]
    )
)
_PARTS = list_of(pa.struct([pa.field("part", pa.string(), nullable=False), pa.field("score", pa.float64())]))
_SAMPLING_3 = pa.struct(
    [
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("top_k", pa.int64()),
        pa.field("top_p", pa.float64()),
        pa.field("min_p", pa.float64()),
        pa.field("max_new_tokens", pa.int64(), nullable=False),
        pa.field("stop_ids", IDS),
        pa.field("stop_strings", list_of(pa.string()), nullable=False),
    ]
)
SAMPLING = pa.struct([*_SAMPLING_3, pa.field("logprobs", pa.string())])
"""How an answer was sampled. A file in which no vocabulary was cut does not say what log-probs are of."""
COMPUTED = ("old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns", "weights")
"""The fields of a batch that are computed per position, and the columns of the same names."""


def _from_version_1(table: pa.Table) -> pa.Table:
    """Version 1 has no total, only the score that clipping and penalties have gone into; parts of it are a map."""
    table = table.append_column(pa.field("total", pa.float64()), table["score"].cast(pa.float64()))
    maps = table["scores"].combine_chunks()
    pairs = pa.StructArray.from_arrays([maps.keys, maps.items], fields=list(_PARTS.value_type))
    lists = pa.ListArray.from_arrays(maps.offsets, pairs, type=_PARTS)
    return table.set_column(table.schema.get_field_index("scores"), pa.field("scores", _PARTS), lists)


ROLLOUTS = Format(
    name="rollouts",
    version=5,
    upgrades={1: _from_version_1},
    schema=pa.schema(
        [
            pa.field("step", pa.int64(), nullable=False),
            pa.field("group", pa.int64(), nullable=False),
            pa.field("episode", pa.int64(), nullable=False),
            pa.field("agent", pa.string(), nullable=False),
            pa.field("author", pa.string(), nullable=False),
            pa.field("prompt", pa.int64()),
            pa.field("sample", pa.int64()),
            pa.field("prompt_text", pa.string(), nullable=False),
            pa.field("answer_text", pa.string(), nullable=False),
            pa.field("messages", _MESSAGES),
            pa.field("total", pa.float64()),
            pa.field("score", pa.float64()),
            pa.field("baseline", pa.float64()),
            pa.field("scores", _PARTS, nullable=False),
            pa.field("reward_failure", pa.string()),
            pa.field("finish", pa.string(), nullable=False),
            pa.field("policy_version", pa.int64(), nullable=False),
            pa.field("versions", _VERSIONS),
            pa.field("seed", pa.int64()),
            pa.field("sampling", SAMPLING),
            pa.field("turns", _TURNS, nullable=False),
            pa.field("authors", _AUTHORS),
            pa.field("ids", IDS, nullable=False),
            pa.field("pieces", PIECES),
            pa.field("roles", CODES, nullable=False),
            pa.field("verdicts", CODES),
            pa.field("behaviour_logprobs", FLOATS),
            pa.field("supports", NESTED_IDS),
            *(pa.field(name, FLOATS) for name in COMPUTED),
            pa.field("behaviour_prompt_ids", IDS),
            pa.field("extras", pa.string(), nullable=False),
        ]
    ),
)


PINNED = replace(ROLLOUTS, version=4, schema=pa.schema([c for c in ROLLOUTS.schema if c.name != "versions"]))
"""What is written where no trajectory is of several versions, so that older versions read it."""
_UNCUT = [
    column.with_type(_SAMPLING_3) if column.name == "sampling" else column
    for column in PINNED.schema
    if column.name != "supports"
]
UNCUT = replace(PINNED, version=3, schema=pa.schema(_UNCUT))
"""What is written where no vocabulary was cut either."""


UPDATES = Format(
    name="updates",
    version=1,
    schema=pa.schema(
        [
            pa.field("step", pa.int64(), nullable=False),
            pa.field("rollout_step", pa.int64(), nullable=False),
            pa.field("trajectory", pa.int64(), nullable=False),
            pa.field("epoch", pa.int64(), nullable=False),
            pa.field("minibatch", pa.int64(), nullable=False),
            pa.field("verdicts", CODES, nullable=False),
            pa.field("weights", FLOATS),
            pa.field("logprobs", FLOATS),
            pa.field("ratio", FLOATS),
        ]
    ),
)
