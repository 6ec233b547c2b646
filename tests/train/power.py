"""What a disk may hold after the power is cut: the operations of a save, recorded and replayed up to any point.

Until a file is fsynced, any of its contents since the last fsync, or none, may be what stays. Until a directory is
fsynced, any of its lists of entries since the last fsync may be. Renames within a directory are one operation.
"""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

Disk = dict | bytes
"""A directory by name of entry, or the bytes of a file."""
CALLS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


class PowerModel:
    """Watches one directory tree. `moments` holds, per operation, what every file and directory may come back as."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.moments: list[dict[int, list[object]]] = []
        self._ids: dict[int, int] = {}
        self._next = 0
        self._history: dict[int, list[object]] = {}
        self.top = -1
        self.look()
        for history in self._history.values():
            del history[:-1]  # what is there at the start is on the disk
        self.moments.clear()

    def record(self, monkeypatch, work: Callable[[], object]) -> None:
        """Run `work` and note every operation it makes under the root."""
        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._watched(name, getattr(os, name)))
            work()
        self.look()

    def _watched(self, name: str, real: Callable) -> Callable:
        def inner(*args: object, **options: object) -> object:
            self.look()
            result = None if name == "fsync" else real(*args, **options)  # the model is the disk
            self.look(synced=os.fstat(args[0]).st_ino if name == "fsync" else None)
            return result

        return inner

    def look(self, synced: int | None = None) -> None:
        """Note the tree as it is; what was synced has no other past."""
        alive: dict[int, object] = {}
        self._walk(self.root, alive)
        self._ids = {inode: uid for inode, uid in self._ids.items() if inode in alive}  # numbers are used again
        for inode, content in alive.items():
            uid = self._uid(inode)
            history = self._history.setdefault(uid, [{} if isinstance(content, dict) else b""])
            if history[-1] != content:
                history.append(content)
            if inode == synced:
                del history[:-1]
        self.top = self._uid(self.root.stat().st_ino)
        self.moments.append({uid: list(history) for uid, history in self._history.items()})

    def _walk(self, path: Path, alive: dict[int, object]) -> int:
        inode = path.stat().st_ino
        if path.is_dir():
            alive[inode] = {child.name: self._known(child, alive) for child in sorted(path.iterdir())}
        else:
            alive[inode] = path.read_bytes()
        return inode

    def _known(self, path: Path, alive: dict[int, object]) -> int:
        return self._uid(self._walk(path, alive))

    def _uid(self, inode: int) -> int:
        if inode not in self._ids:
            self._ids[inode] = self._next
            self._next += 1
        return self._ids[inode]

    def disks(self, *, seed: int, draws: int) -> Iterator[tuple[bool, Disk]]:
        """Whether the work was over, and what the disk may hold then; no two alike.

        For each moment: all of it, nothing that was not synced, and `draws` mixtures.
        """
        rng = random.Random(seed)
        seen = set()
        for histories in self.moments:
            over = histories is self.moments[-1]
            for pick in (lambda h: h[-1], lambda h: h[0], *[rng.choice] * draws):
                disk = self._tree(self.top, {uid: pick(history) for uid, history in histories.items()})
                if (over, repr(disk)) not in seen:
                    seen.add((over, repr(disk)))
                    yield over, disk

    def _tree(self, uid: int, chosen: dict[int, object]) -> Disk:
        content = chosen[uid]
        if isinstance(content, dict):
            return {name: self._tree(child, chosen) for name, child in content.items()}
        return content


def build(disk: Disk, target: Path) -> None:
    """Put the contents of a disk at `target`."""
    if isinstance(disk, dict):
        target.mkdir()
        for name, child in disk.items():
            build(child, target / name)
    else:
        target.write_bytes(disk)
