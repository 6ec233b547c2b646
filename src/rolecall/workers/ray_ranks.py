"""Processes that train, placed by Ray and joined by torch.distributed: what torchrun does, on the machines of a Ray cluster.

    python -m rolecall.workers.ray_ranks --ranks 4 --gpus 1 rl --preset grpo --out /shared/runs/grpo

Ray finds room for each (a placement group) and starts `rolecall rl …` there with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. From
then on they are ranks like any other; what they print is printed here. Needs `rolecall[ray]`.
"""

import argparse
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rolecall.errors import UserError
from rolecall.workers.ray_cluster import check_resources, connected, in_words

_PLACE_S = 60.0
"""How long Ray may take to find room that there is."""
_RETRY = 75
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Where Ray has placed a rank."""

    machine: str
    address: str
    port: int
    """One that is free there."""
    gpus: tuple[str, ...] = ()
    """Those that Ray gave it."""


class Rank:
    """An actor that runs one of the processes. Its other methods answer meanwhile."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def found(self) -> Found:
        """Where it is."""
        import ray

        context = ray.get_runtime_context()
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        gpus = context.get_accelerator_ids().get("GPU", [])
        return Found(
            machine=context.get_node_id(), address=ray.util.get_node_ip_address(), port=port, gpus=tuple(map(str, gpus))
        )

    def run(self, words: Sequence[str], env: Mapping[str, str], cwd: str) -> Iterator[tuple[int, bytes] | int]:
        """Run rolecall: what it prints, by descriptor, then its exit code."""
        pipe: Any = subprocess.PIPE
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "rolecall", *words],
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            env={**os.environ, **env},
            cwd=cwd if Path(cwd).is_dir() else None,
            preexec_fn=_end_with_parent,
        )
        with selectors.DefaultSelector() as open_pipes:
            for number, stream in ((1, process.stdout), (2, process.stderr)):
                open_pipes.register(stream, selectors.EVENT_READ, number)  # type: ignore[arg-type]
            while open_pipes.get_map():
                for key, _ in open_pipes.select():
                    chunk = os.read(key.fd, 1 << 16)
                    if chunk:
                        yield key.data, chunk
                    else:
                        open_pipes.unregister(key.fileobj)
        yield process.wait()

    def signal(self, number: int) -> None:
        """Pass a signal on."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


def _end_with_parent() -> None:
    """If the actor is killed, its process saves and ends, too."""
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGTERM)


def environments(found: Sequence[Found], *, ray_address: str) -> list[dict[str, str]]:
    """What the process of each rank finds set. Ranks of one machine follow each other, and each sees all of their GPUs, as under
    torchrun."""
    beside = Counter[str]()
    made = []
    for rank, place in enumerate(found):
        local, beside[place.machine] = beside[place.machine], beside[place.machine] + 1
        numbers = {"RANK": rank, "WORLD_SIZE": len(found), "LOCAL_RANK": local, "MASTER_PORT": found[0].port}
        made.append({name: str(number) for name, number in numbers.items()})
        made[-1] |= {"MASTER_ADDR": found[0].address, "RAY_ADDRESS": ray_address}
    for place, env in zip(found, made, strict=True):
        env["LOCAL_WORLD_SIZE"] = str(beside[place.machine])
        if gpus := [gpu for other in found if other.machine == place.machine for gpu in other.gpus]:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return made


def exit_code(codes: Sequence[int]) -> int:
    """That of all ranks: what one of them says is wrong, else 75 if any was lost, else 0."""
    said = [code for code in codes if code > 0 and code != _RETRY]
    return said[0] if said else _RETRY if any(codes) else 0


def launch(words: Sequence[str], *, ranks: int, cpus: float, gpus: float) -> int:
    """Run a command in so many processes, each with its CPUs and GPUs; the exit code for all of them."""
    ray, own = connected(cpus=ranks * cpus)
    needs = {"CPU": cpus, "GPU": gpus}
    group: Any = None
    try:
        check_resources(ray, ranks, needs, what="processes that train", option=None)
        group = ray.util.placement_group([{k: v for k, v in needs.items() if v}] * ranks, strategy="PACK")
        try:
            ray.get(group.ready(), timeout=_PLACE_S)
        except ray.exceptions.GetTimeoutError as error:
            raise UserError(
                f"Ray found no room for {ranks} processes that train within {_PLACE_S:g} s: look at `ray status`, then resume",
                exit_code=_RETRY,
            ) from error
        actors = [_placed(ray, group, number, needs) for number in range(ranks)]
        found = ray.get([actor.found.remote() for actor in actors])
        order = sorted(
            range(ranks), key=lambda number: (found[number].machine != found[0].machine, found[number].machine)
        )
        actors = [actors[number] for number in order]
        address = ray.get_runtime_context().gcs_address
        envs = environments([found[number] for number in order], ray_address=address)
        return exit_code(_joined(ray, actors, words, envs))
    except ray.exceptions.RayError as error:
        raise UserError(f"Ray lost a process before it began to train: {in_words(error)}", exit_code=_RETRY) from error
    finally:
        if group is not None:
            with suppress(Exception):  # the cluster may be gone
                ray.util.remove_placement_group(group)
        if own:
            ray.shutdown()


def _placed(ray: Any, group: Any, number: int, needs: Mapping[str, float]) -> Any:
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=number
    )
    actor = ray.remote(Rank).options(
        num_cpus=needs["CPU"], num_gpus=needs["GPU"], scheduling_strategy=strategy, max_concurrency=2, max_restarts=0
    )
    return actor.remote()


def _joined(ray: Any, actors: Sequence[Any], words: Sequence[str], envs: Sequence[Mapping[str, str]]) -> list[int]:
    """Run all of them to their ends; the exit code of each, below 0 if it was killed or its machine is gone."""
    codes = [-signal.SIGKILL] * len(actors)

    def follow(rank: int) -> None:
        try:
            said = (
                actors[rank].run.options(num_returns="streaming").remote(list(words), dict(envs[rank]), str(Path.cwd()))
            )
            for ref in said:
                heard = ray.get(ref)
                if isinstance(heard, int):
                    codes[rank] = heard
                else:
                    os.write(heard[0], heard[1])
        except ray.exceptions.RayError as error:
            sys.stderr.write(f"rank {rank} is lost: {in_words(error)}\n")

    def pass_on(number: int, _: Any) -> None:
        for actor in actors:
            actor.signal.remote(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = [threading.Thread(target=partial(follow, rank), daemon=True) for rank in range(len(actors))]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(0.2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return codes


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run a command of rolecall in processes that Ray places.")
    parser.add_argument("--ranks", type=int, required=True, help="processes that train together")
    parser.add_argument("--cpus", type=float, default=1.0, help="CPUs of each")
    parser.add_argument("--gpus", type=float, default=0.0, help="GPUs of each")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="rl --preset grpo …")
    given = parser.parse_args()
    if given.ranks < 1 or not given.command:
        parser.error("give --ranks, 1 or more, and after the options a command such as rl --preset grpo")
    try:
        sys.exit(launch(given.command, ranks=given.ranks, cpus=given.cpus, gpus=given.gpus))
    except UserError as error:
        sys.stderr.write(f"rolecall: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
