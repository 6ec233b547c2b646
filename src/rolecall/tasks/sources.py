"""Rows of whatever people have: files, Hugging Face datasets (in memory, streamed, on the hub), data frames, lists."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.tasks.row_files import SUFFIXES, ArrowRows, read_rows, splits_of_folder
from rolecall.tasks.rows import ListRows, Row, RowError, Rows
from rolecall.tasks.streams import Stream

RowsSource = str | Sequence[Mapping[str, Any]] | Iterable[Mapping[str, Any]] | Any
"""A name or file, a list of dicts, a Hugging Face dataset, a data frame, or anything that can be iterated again."""

TEST_SPLITS = ("test", "validation", "valid", "dev", "eval")
"""Splits that evaluations read, the first one there is."""

_HUB = re.compile(r"(?P<id>[\w-][\w.-]*/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.-]+))?")
_HUB_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """Rows to train on and, if the data brings them, rows to evaluate on."""

    train: Rows
    test: Rows | None = None


class DatasetRows:
    """A `datasets.Dataset`, row by row."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset.with_format(None)
        self.columns: tuple[str, ...] = tuple(dataset.column_names)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        return dict(self._dataset[range(len(self))[index]])

    def __iter__(self) -> Iterator[Row]:
        return (dict(row) for row in self._dataset)


def splits_of(given: Any) -> Splits:
    """The rows of an object from Python."""
    if isinstance(given, Splits):
        return given
    if isinstance(given, Mapping):
        if not given or not all(hasattr(rows, "__iter__") and not isinstance(rows, str) for rows in given.values()):
            raise RowError("rows are a dict, which is one row or none: give a list of dicts, or a dict of splits")
        return _splits({str(split): rows for split, rows in given.items()}, lambda split: _table(given[split]))
    return Splits(train=_table(given))


def named_splits(name: str) -> Splits:
    """The rows of a file, a folder or a dataset on the hub."""
    path = Path(name).expanduser()
    if not path.exists() and (found := hub_name(name)) is not None:
        return _hub(name, **found)
    if path.is_dir() and (names := splits_of_folder(path)):
        return _splits(names, lambda split: read_rows(path, split=split))
    return Splits(train=read_rows(path))


def hub_name(name: str) -> dict[str, Any] | None:
    """`owner/name`, `:config` and `@split` of a dataset on the hub; None if the name looks like a path."""
    match = _HUB.fullmatch(name)
    if match is None or Path(match["id"]).parent.is_dir() or name.endswith((*SUFFIXES, ".gz", ".txt")):
        return None
    return match.groupdict()


def _splits(names: Iterable[str], read: Callable[[str], Rows]) -> Splits:
    names = list(names)
    train = "train" if "train" in names else names[0] if len(names) == 1 else None
    if train is None:
        raise RowError(f"the rows have the splits {', '.join(names)} and none is called train: choose one of them")
    test = next((split for split in TEST_SPLITS if split in names and split != train), None)
    return Splits(train=read(train), test=None if test is None else read(test))


def _table(given: Any) -> Rows:
    package, name = type(given).__module__.partition(".")[0], type(given).__name__
    rows: Rows
    if package == "datasets" and name == "Dataset":
        rows = DatasetRows(given)
    elif package == "pandas" and name == "DataFrame":
        rows = _frame(given)
    elif package == "polars" and name in ("DataFrame", "LazyFrame"):
        rows = ArrowRows((given.collect() if name == "LazyFrame" else given).to_arrow())
    elif package == "pyarrow" and name == "Table":
        rows = ArrowRows(given)
    elif hasattr(given, "columns") and hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        rows = given
    elif isinstance(given, Sequence) and not isinstance(given, str | bytes):
        wrong = next((index for index, row in enumerate(given) if not isinstance(row, Mapping)), None)
        if wrong is not None:
            raise RowError(f"row {wrong} must be a dict of columns, it is a {type(given[wrong]).__name__}")
        rows = ListRows(given)
    elif isinstance(given, Iterator):
        raise RowError(
            "rows are a generator, which can be read once only, so a run could not be resumed: give a list, or "
            "datasets.IterableDataset.from_generator(function)"
        )
    elif isinstance(given, Iterable) and not isinstance(given, str | bytes):
        return Stream(given)
    else:
        raise RowError(
            f"rows are a {type(given).__name__}: give a file, a list of dicts, a Hugging Face dataset or a data frame"
        )
    if not len(rows):
        raise RowError("there are no rows")
    return rows


def _frame(frame: Any) -> Rows:
    import pyarrow

    try:
        return ArrowRows(pyarrow.Table.from_pandas(frame, preserve_index=False))
    except pyarrow.ArrowException:  # a column of several types, such as prompts that are text here and messages there
        rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
        return ListRows({str(name): value for name, value in row.items()} for row in rows)


def _hub(name: str, *, id: str, config: str | None, split: str | None) -> Splits:
    """A dataset of the Hugging Face hub, through its own package."""
    try:
        import datasets
    except ImportError as error:
        raise RowError(
            f"there is no file {name}, and to read it as a dataset of the Hugging Face hub a package is missing: "
            "pip install 'rolecall[data]'"
        ) from error
    found = _load(datasets, name, id, config, local=not _reachable(name, id))
    if split is None:
        return splits_of(found)
    if split not in found:
        raise RowError(f"{id} has no split {split!r}; it has {', '.join(found)}")
    return splits_of(found[split])


def _reachable(name: str, id: str) -> bool:
    """Whether the hub answers and has the dataset; asked once, so that to be offline is known at once."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        HfApi().dataset_info(id, timeout=_HUB_TIMEOUT_S)
    except GatedRepoError as error:
        raise RowError(
            f"{id} is gated on the Hugging Face hub: ask for access there and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise RowError(
            f"there is no file {name}, and no dataset {id} on the Hugging Face hub; check the name"
        ) from error
    except Exception:  # offline mode, no route, a proxy's own page: whatever it is, the hub cannot be asked
        return False
    return True


@contextmanager
def _offline(config: Any) -> Iterator[None]:
    """Look at copies on this machine only, instead of retrying for a minute."""
    from huggingface_hub import constants

    places: tuple[Any, ...] = (config, constants)
    before = [(place, place.HF_HUB_OFFLINE) for place in places]
    try:
        for place, _ in before:
            place.HF_HUB_OFFLINE = True
        yield
    finally:
        for place, value in before:
            place.HF_HUB_OFFLINE = value


def _load(datasets: Any, name: str, id: str, config: str | None, *, local: bool) -> Any:
    try:
        with _offline(datasets.config) if local else nullcontext():
            return datasets.load_dataset(id, config)
    except Exception as error:  # its errors are of a dozen classes
        if local:
            raise RowError(
                f"there is no file {name}, and the Hugging Face hub cannot be reached to look for a dataset {id}, of which "
                "there is no copy on this machine"
            ) from error
        why = " ".join(str(error).split())
        raise RowError(
            f"the dataset {id} cannot be read: {why[:300]}; `{id}:CONFIG@SPLIT` names a part of it"
        ) from error
