"""A machine of a Ray cluster whose cable is cut while it samples. `make test-cluster` runs it; it needs root and `ip netns`.

Two network namespaces with one cable between them: the head and the trainer in the first, the other machine in the second.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid

import pytest

pytest.importorskip("ray", reason="needs rolecall[ray]")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
NET, PORT, SILENCE = "10.213.72", 6399, 8.0
DRIVER = f"""
import json, sys, threading, time
from rolecall.config.parts import EngineOptions
from rolecall.policy.load import load
from rolecall.rollout.open import open_engine
from rolecall.rollout.ray_pool import RayPool
from rolecall.types import Request, Sampling

HOW = {{"name": "native", "dtype": None, "max_rows": 256}}
tiny, measured = load("tiny"), {{}}
add = lambda name, value: measured.__setitem__(name, measured.get(name, 0.0) + value)
pool = RayPool(tiny, EngineOptions(workers=2, cluster="ray", worker_silence={SILENCE}), how=HOW, reads={{}}, add=add)
sampling = Sampling(max_new_tokens=200, stop_ids=())
asked = [Request(prompt_ids=tuple(range(65, 70 + i)), sampling=sampling, n=2, prompt=i, seed=5, step=0) for i in range(6)]
end = time.monotonic() + 120
while len(pool.pids) < 2 and time.monotonic() < end:  # one on each machine
    pool.generate(asked[:1])
begun = time.monotonic()
first = pool.generate(asked)
usual = time.monotonic() - begun
print("ready", len(pool.pids), flush=True)
sys.stdin.readline()  # the cable is cut now
begun = time.monotonic()
found = pool.generate(asked)
took = time.monotonic() - begun
alone = [c for request in asked for c in open_engine(tiny, **HOW).generate([request])]
print(json.dumps({{"same": found == alone == first, "took": took, "usual": usual, **measured}}), flush=True)
import os
os._exit(0)  # nobody waits for the machine that is gone
"""


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def hosts():
    names = [f"rc-{uuid.uuid4().hex[:6]}-{i}" for i in range(2)]
    if shutil.which("ip") is None or os.geteuid() != 0 or ip("netns", "add", names[0]).returncode:
        pytest.skip("a cut cable needs root and `ip netns`")
    steps = [
        ["netns", "add", names[1]],
        ["link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1]],
    ]
    for i, name in enumerate(names, start=1):
        steps.append(["-n", name, "addr", "add", f"{NET}.{i}/24", "dev", "eth0"])
        steps += [["-n", name, "link", "set", device, "up"] for device in ("lo", "eth0")]
    try:
        for step in steps:
            made = ip(*step)
            if made.returncode:
                pytest.skip(f"a cut cable needs network namespaces: ip {' '.join(step)}: {made.stderr.strip()}")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.fixture
def cluster(hosts, tmp_path):
    """A machine in each namespace, of one processor; ended with all their processes."""
    short = tempfile.mkdtemp(prefix="rc-")  # paths of sockets are short
    here = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": f"{NET}.1:{PORT}", "HF_HUB_OFFLINE": "1"}
    here["RAY_memory_monitor_refresh_ms"] = "0"  # other programs of this machine are none of its business
    here |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus", "1", "--block", "--disable-usage-stats"]
    where = [
        ["--head", "--port", str(PORT), "--node-ip-address", f"{NET}.1", "--include-dashboard", "false", "--temp-dir", short],
        ["--address", f"{NET}.1:{PORT}", "--node-ip-address", f"{NET}.2"],
    ]  # fmt: skip
    started: list[subprocess.Popen] = []
    try:
        for name, words in zip(hosts, where, strict=True):
            with (tmp_path / f"{name}.log").open("wb") as log:
                command = ["ip", "netns", "exec", name, *ray, *words]
                without = {key: value for key, value in here.items() if key != "RAY_ADDRESS"}
                started.append(subprocess.Popen(command, env=without, stdout=log, stderr=log, start_new_session=True))
            wait_for_port(hosts[0])
        yield here
    finally:
        for name in hosts:  # everything that lives in the namespaces was started here
            for pid in ip("netns", "pids", name).stdout.split():
                subprocess.run(["kill", "-9", pid], check=False, capture_output=True)
        for process in started:
            process.wait(timeout=60)
        shutil.rmtree(short, ignore_errors=True)


def wait_for_port(host):
    """Until the head answers."""
    look = f"import socket, time\nfor _ in range(240):\n try: socket.create_connection(('{NET}.1', {PORT}), 1).close(); break\n except OSError: time.sleep(.5)\nelse: raise SystemExit(1)"
    assert subprocess.run(["ip", "netns", "exec", host, sys.executable, "-c", look], check=False).returncode == 0


def test_a_cut_cable_is_noticed_by_our_deadline_and_changes_nothing(hosts, cluster, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    command = ["ip", "netns", "exec", hosts[0], sys.executable, str(script)]
    stranger = "from rolecall.workers.ray_cluster import connected; connected(cpus=1)"
    said = subprocess.run(
        [*command[:-1], "-c", stranger],
        env=cluster | {"RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "cannot be used: it asks for a token, so set RAY_AUTH_MODE=token" in said.stderr
    driver = subprocess.Popen(command, env=cluster, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout.readline().split() == ["ready", "2"]
        assert ip("-n", hosts[1], "link", "set", "eth0", "down").returncode == 0
        said, _ = driver.communicate("go\n", timeout=600)
    finally:
        driver.kill()
        driver.communicate()
    found = json.loads(said.splitlines()[-1])  # Ray prints, too
    assert found["same"]
    assert found["workers/lost"] >= 1
    assert found["took"] < 60 + 3 * found["usual"], "Ray alone takes 66 s"
