"""Servers that Ray places: `rolecall serve` in an actor each, with the CPUs and GPUs it asks for (needs `rolecall[ray]`).

Ray finds the machine; the actor keeps its server alive, under the same address. Whether a server answers rightly is found out as for any
other: it is probed, replaced and asked again by the fleet.
"""

import ctypes
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

from rolecall.config.parts import EngineOptions
from rolecall.config.use import KEY_VARIABLE, server_key
from rolecall.errors import UserError
from rolecall.workers.ray_cluster import check_resources, connected, in_words, refuse_missing

_PLACE_S = 60.0
"""How long Ray may take to find room that there is."""
_RESTART_S = 1.0
_PR_SET_PDEATHSIG = 1


class ServerHost:
    """In the actor: a server, which is started again when it ends."""

    def __init__(self, model: str, arguments: str, key: str) -> None:
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        self._words = [*(sys.executable, "-m", "rolecall", "serve", model), *shlex.split(arguments)]
        self._words += ["--host", host, "--port", str(port)]
        self._env = {**os.environ, KEY_VARIABLE: key}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  as long as the actor lives
        self._url, self._stopped = f"http://{host}:{port}", False
        self._process = self._start()
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    def address(self, seconds: float) -> str:
        """Its address, once it answers."""
        end = monotonic() + seconds
        while monotonic() < end:
            if self._process.poll() is not None:
                self._output.seek(0)
                said = self._output.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
                raise RuntimeError(f"the server on {socket.gethostname()} ended: {said[-1][:300]}")
            with suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"{self._url}/health", timeout=5.0).close()
                self._keeper.start()
                return self._url
            sleep(0.2)
        raise RuntimeError(f"the server on {socket.gethostname()} did not answer within {seconds:g} s")

    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def stop(self) -> None:
        """End it."""
        self._stopped = True
        self._process.terminate()

    def _start(self) -> subprocess.Popen[bytes]:
        # It ends when the actor does, however that ends.
        die = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: 0
        return subprocess.Popen(
            self._words,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env=self._env,
            preexec_fn=lambda: die(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )

    def _keep(self) -> None:
        while not self._stopped:
            self._process.wait()
            sleep(_RESTART_S)
            if not self._stopped:
                self._process = self._start()


class PlacedServers:
    """`engine.placed_servers` servers of a model on a Ray cluster, by the addresses in `urls`."""

    def __init__(self, model: str, options: EngineOptions, *, count: int) -> None:
        """Waits until all answer. `count` is this process's share of them."""
        needs = {"CPU": float(options.server_cpus), "GPU": options.server_gpus}
        self.key = server_key() or secrets.token_urlsafe(24)
        self._ray, self._own = connected(cpus=count * options.server_cpus)
        self._group: Any = None
        self._hosts: list[Any] = []
        try:
            check_resources(self._ray, count, needs, what="servers", option="engine.placed_servers")
            self._group = self._reserved([{n: a for n, a in needs.items() if a}] * count)
            self._hosts = [
                self._host(place, needs).remote(model, options.server_args, self.key) for place in range(count)
            ]
            waits = [host.address.remote(options.server_patience) for host in self._hosts]
            self.urls: tuple[str, ...] = tuple(self._ray.get(waits))
        except self._ray.exceptions.RayError as error:
            self.close()
            refuse_missing(error)
            raise UserError(f"Ray could not start the servers: {in_words(error)}", exit_code=1) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the servers and give their place back."""
        for host in self._hosts:
            with suppress(Exception):  # it may be dead, and so may be the cluster
                self._ray.get(host.stop.remote(), timeout=5.0)
            with suppress(Exception):
                self._ray.kill(host, no_restart=True)
        self._hosts = []
        with suppress(Exception):
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
        if self._own:
            self._ray.shutdown()
            self._own = False

    @property
    def pids(self) -> list[int]:
        """The servers' processes, wherever they are."""
        return list(self._ray.get([host.pid.remote() for host in self._hosts]))

    def _reserved(self, bundles: list[dict[str, float]]) -> Any:
        group = self._ray.util.placement_group(bundles, strategy="SPREAD")
        try:
            self._ray.get(group.ready(), timeout=_PLACE_S)
        except self._ray.exceptions.GetTimeoutError as error:
            self._ray.util.remove_placement_group(group)
            raise UserError(
                f"Ray has found no room for {len(bundles)} servers within {_PLACE_S:g} s: others hold it; look at `ray status`, then "
                "resume",
                exit_code=75,
            ) from error
        return group

    def _host(self, place: int, needs: dict[str, float]) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=place)
        how = {"num_cpus": needs["CPU"], "num_gpus": needs["GPU"], "scheduling_strategy": where}
        return self._ray.remote(ServerHost).options(max_concurrency=2, max_restarts=0, **how)
