"""Checkpoints of a sharded run: every rank writes and reads its own part of weights and optimiser, as safetensors.

The format is that of torch's distributed checkpoints for Hugging Face: `parts/shard-00002-model-….safetensors`, each with
the place of its tensors in the whole, so that another number of ranks can read them. Rank 0 makes the directory, adds what
is not sharded, and seals it when all parts are there.
"""

import json
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname
from time import sleep
from typing import Any

import torch
from torch import Tensor, nn

from rolecall.errors import UserError
from rolecall.policy.sharded import rest, whole
from rolecall.train.lock import LOCK
from rolecall.train.manifest import RefusedCheckpointError
from rolecall.train.ranks import Ranks
from rolecall.train.state import NotFinite, first_non_finite

FOLDER = "parts"
_FILE_BYTES = 128 * 2**20
_MOMENTS = ("exp_avg", "exp_avg_sq")
_LOOKS, _BETWEEN_LOOKS = 5, 0.5
"""How often, and after how many seconds, a rank looks again for a directory that another host has just made."""


class Parts:
    """The tensors of a sharded module and its optimiser, on one rank."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        more: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        """`more` gives other sharded tensors that are saved, by name."""
        self.module, self.optimizer, self.ranks, self.more = module, optimizer, ranks, more
        self._told = False

    def check_seen(self, run: Path | None) -> None:
        """Raise, on all ranks, unless every one sees the run's directory, which rank 0 gives: each writes its part there."""
        held = None if run is None else (str(run), (run / LOCK).read_text())
        place, token = self.ranks.gather([held])[0]
        for _ in range(_LOOKS):
            found = _text_of(Path(place) / LOCK)
            if found == token:
                break
            sleep(_BETWEEN_LOOKS)  # another host's file system may be late
        here = None if found == token else f"rank {self.ranks.number} on {gethostname()}"
        if blind := [who for who in self.ranks.gather([here]) if who]:
            raise UserError(
                f"{blind[0]} does not see {place} of rank 0, and every process of a sharded run writes its part of a "
                "checkpoint there: give --out a directory that all hosts share"
            )

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a save, on rank 0: all ranks meet before it, and those that wait for a directory hear if there is none."""
        self._told = False
        self._meet()
        try:
            yield
        finally:
            if not self._told:
                self.ranks.gather([None])

    def assist(self) -> None:
        """A save, on another rank: write this one's part into the directory that rank 0 names."""
        try:
            self._meet()
        except NotFinite:
            return  # rank 0 says so
        directory = self.ranks.gather([None])[0]
        if directory is not None:
            with suppress(OSError):  # all ranks have it: rank 0 says so
                self._save(Path(directory))

    def write(self, directory: Path) -> dict[str, Any]:
        """All parts, on rank 0; returns what is not sharded of the optimiser."""
        self._told = True
        self.ranks.gather([str(directory)])
        self._save(directory)
        return {name: {"step": whole(held["step"])} for name, held in self._optimised().items()}

    def read(self, directory: Path, optimizer: Mapping[str, Any]) -> None:
        """Put back what was written, by any number of ranks, with what `write` returned. The module need not be sharded."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        place = directory / FOLDER
        rest(self.module)
        named = dict(self.module.named_parameters())
        for name in optimizer.keys() & named.keys():
            p = named[name]
            self.optimizer.state[p] = {**optimizer[name], **{key: torch.zeros_like(p) for key in _MOMENTS}}
        wanted, reader = self._tensors(), HuggingFaceStorageReader(str(place))
        there: dict[str, Any] = reader.read_metadata().state_dict_metadata
        sizes = [{n: tuple(t.size) for n, t in there.items()}, {n: tuple(t.shape) for n, t in wanted.items()}]
        for name in sorted(sizes[0].keys() | sizes[1].keys()):
            old, new = (size.get(name, "absent") for size in sizes)
            if old != new:
                raise RefusedCheckpointError(
                    f"the checkpoint {directory} is of another model: {name} is {old} there and {new} here"
                )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process, not sharded
            load(wanted, storage_reader=reader, no_dist=not torch.distributed.is_initialized())

    def _meet(self) -> None:
        """All ranks are here, and no part of a weight is NaN or infinite on any."""
        rest(self.module)
        bad = [name for name in self.ranks.gather([first_non_finite(dict(self.module.named_parameters()))]) if name]
        if bad:
            raise NotFinite(f"{bad[0]} is not finite: this checkpoint was not written, the last one is good")

    def _save(self, directory: Path) -> None:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        tensors = self._tensors()
        place, files = str(directory / FOLDER), _files_of(tensors, self.ranks.count)
        writer = HuggingFaceStorageWriter(place, fqn_to_index_mapping=files, save_distributed=True)
        try:
            save(tensors, storage_writer=writer)
        except CheckpointException as failed:  # on all ranks, if it happened on any
            error, _ = next(iter(failed.failures.values()))
            raise error if isinstance(error, OSError) else OSError(str(error)) from failed
        failed_at: list[OSError] = []
        try:
            for path in (directory / FOLDER).glob(f"shard-{self.ranks.number + 1:05d}-*"):
                _sort_header(path)
        except OSError as error:
            failed_at = [error]
        if failures := self.ranks.gather(failed_at):  # rank 0 seals what all have ended
            raise failures[0]

    def _optimised(self) -> dict[str, Any]:
        """What the optimiser holds of each parameter, by the parameter's name."""
        return {
            name: self.optimizer.state[p] for name, p in self.module.named_parameters() if p in self.optimizer.state
        }

    def _tensors(self) -> dict[str, Tensor]:
        found = {f"weights.{name}": p.detach() for name, p in self.module.named_parameters() if p.requires_grad}
        for name, held in self._optimised().items():
            found |= {f"optimizer.{name}.{key}": held[key] for key in _MOMENTS}
        return found | {f"more.{name}": tensor.detach() for name, tensor in self.more().items()}


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _files_of(tensors: Mapping[str, Tensor], ranks: int) -> dict[str, int]:
    """The number of the file that each tensor goes into, from 1: a file is held in memory while it is written."""
    files, number, held = {}, 1, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size() // ranks
        if held and held + size > _FILE_BYTES:
            number, held = number + 1, 0
        files[name], held = number, held + size
    return files


def _sort_header(path: Path) -> None:
    """Put a safetensors file's own remarks in order, which come in a random one: equal states give equal bytes."""
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(text) <= length, f"the header of {path} grew"
        file.seek(8)
        file.write(text.ljust(length))
