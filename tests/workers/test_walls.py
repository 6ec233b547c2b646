"""What a worker cannot see, reach, leave behind or send; and what any honest reward still can."""

import ctypes
import fcntl
import http.server
import logging
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from rolecall.agents.pool import EnvPool, Failure
from rolecall.errors import UserError
from rolecall.marl.envs import open_envs
from rolecall.rewards import RewardError, RewardPool, Sample
from rolecall.workers import pool as pools

HERE = Path(__file__).parent
ACT = f"{HERE / 'intruders.py'}:act"


def score(pool, *texts):
    return pool.score([Sample(prompt="q", completion=text, sample_index=i) for i, text in enumerate(texts)])


def one(pool, text):
    """The score, or why there is none."""
    (scored,) = score(pool, text)
    return scored.failure if scored.total is None else scored.total


@pytest.fixture(scope="module")
def secret():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_API_TOKEN", "7")
        yield


@pytest.fixture(scope="module")
def pool(secret):
    with RewardPool(ACT, workers=1) as made:
        yield made


@pytest.fixture(scope="module")
def open_pool(secret):
    with RewardPool(ACT, workers=1, network=True, variables=["MY_API_*"]) as made:
        yield made


@pytest.fixture(scope="module")
def judge():
    """An HTTP server on this machine that says 0.25 to everything; its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"0.25")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def namespaces():
    return pools._namespaces.allowed


def free(lock, seconds=3.0):
    """Whether nobody holds the lock any more."""
    end = time.monotonic() + seconds
    with Path(lock).open() as held:
        while time.monotonic() < end:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                time.sleep(0.01)
            else:
                return True
    return False


def test_secrets_in_the_environment_are_not_seen_and_the_option_passes_them(pool, open_pool):
    assert [one(pool, f"environment {name}") for name in ("MY_API_TOKEN", "PATH", "HF_HUB_OFFLINE")] == [0, 1, 1]
    why = one(pool, "needs MY_API_TOKEN")
    assert "KeyError: 'MY_API_TOKEN'" in why
    assert why.endswith("; the environment variable MY_API_TOKEN is not passed on: name it in reward_variables")
    assert one(open_pool, "needs MY_API_TOKEN") == 7.0


def test_a_module_that_needs_a_secret_when_it_is_imported_says_so(secret, tmp_path):
    (tmp_path / "keyed.py").write_text("import os\nKEY = os.environ['MY_API_TOKEN']\n")
    with pytest.raises(
        RewardError, match=r"KeyError: 'MY_API_TOKEN'; .* is not passed on: name it in reward_variables"
    ):
        RewardPool(f"{tmp_path / 'keyed.py'}:f", workers=1)


def test_the_trainers_memory_and_environment_cannot_be_opened(pool):
    for name in ("mem", "environ"):
        assert "Error" in str(one(pool, f"opens /proc/{os.getpid()}/{name}"))
    assert one(pool, "opens /proc/self/mem") == 1.0, "its own /proc is there"


def test_there_is_no_network_unless_asked_for(pool, open_pool, judge):
    why = one(pool, f"connects 127.0.0.1:{judge}")
    assert "ConnectionRefusedError" in why
    assert why.endswith("; it has no network: set reward_network to give it one")
    assert "has no network: set reward_network" in one(pool, "connects no-such-host.invalid:80")
    assert one(open_pool, f"connects 127.0.0.1:{judge}") == 1.0
    assert one(open_pool, f"asks_judge {judge}") == 0.25


def test_a_judge_that_hides_its_errors_is_named(judge, caplog):
    with RewardPool(ACT, workers=1) as pool:
        assert [s.total for s in score(pool, f"swallows 127.0.0.1:{judge}", f"swallows 127.0.0.1:{judge}")] == [
            0.5,
            0.5,
        ]
    said = f"reward `act` tried to reach 127.0.0.1:{judge}, but has no network: set reward_network to give it one"
    assert caplog.messages.count(said) == 1


def test_a_port_that_a_reward_opens_cannot_be_reached(pool, tmp_path):
    if not namespaces():
        pytest.skip("this kernel refuses namespaces")
    found = []

    def visit():
        while not (tmp_path / "port").exists() or not (tmp_path / "port").read_text():
            time.sleep(0.01)
        with socket.socket() as visitor:
            found.append(visitor.connect_ex(("127.0.0.1", int((tmp_path / "port").read_text()))))

    visitor = threading.Thread(target=visit)
    visitor.start()
    assert one(pool, f"listens {tmp_path / 'port'}") == 1.0
    visitor.join()
    assert found != [0]


@pytest.mark.parametrize("allowed", [True, False])
def test_nothing_that_a_reward_started_is_left(tmp_path, monkeypatch, allowed):
    monkeypatch.setattr(pools._namespaces, "allowed", allowed and namespaces())
    with RewardPool(ACT, workers=1) as pool:
        assert one(pool, f"orphans {tmp_path / 'lock'}") == 1.0
        assert not free(tmp_path / "lock", 0.05), "it lives as long as the worker"
    assert free(tmp_path / "lock")


def test_processes_are_limited_in_number(monkeypatch):
    if not namespaces():
        pytest.skip("this kernel refuses namespaces")
    real = pools.Walls
    monkeypatch.setattr("rolecall.rewards.pool.Walls", lambda **how: real(**how, processes=20))
    with RewardPool(ACT, workers=1, memory_mb=None) as pool:
        assert one(pool, "forks 600") < 330


def test_an_answer_of_many_megabytes_is_refused_and_the_trainer_stays_small(pool):
    tracemalloc.start()
    try:
        large = one(pool, "sends 30")
        forged = one(pool, "floods 600")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert large == "reward `act` failed on prompt 0 sample 0: it sent back 31 MB, and 4 MB is the limit"
    assert forged == "reward `act` failed on prompt 0 sample 0: it sent back 629 MB, and 4 MB is the limit"
    assert peak < 20e6
    assert one(pool, "sends 1") == 1.0


def test_what_a_reward_prints_is_shown_and_cannot_act_on_the_terminal(pool, capfd, caplog):
    assert one(pool, r"prints \x1b[31mred\x1b[2J") == 1.0
    with caplog.at_level(logging.WARNING):
        one(pool, "chatters 200")
    assert capfd.readouterr() == ("", "")
    assert r"reward `act` printed: \x1b[31mred\x1b[2J" in caplog.messages
    assert r"reward `act` printed: \x1b]0;title\x07" in caplog.messages
    assert sum("printed: line" in message for message in caplog.messages) == 50
    assert caplog.messages[-1] == "reward `act` printed more, which is not shown"


def test_honest_rewards_work_unchanged(tmp_path, monkeypatch):
    (tmp_path / "number.txt").write_text("3")
    (tmp_path / "package_here.py").write_text("VALUE = 4.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    texts = ["reads_here number.txt", "imports_here package_here", "runs_tests", "shares_work", "serves_itself"]
    wanted = [3.0, 4.0, 1.0, 45.0, 1.0]
    with RewardPool(ACT, workers=1) as pool:
        assert [s.total for s in score(pool, *texts)] == wanted


def test_environments_have_the_same_walls(judge, secret):
    texts = ["environment MY_API_TOKEN", "needs MY_API_TOKEN", f"connects 127.0.0.1:{judge}", "sends 30"]
    env = f"{HERE / 'intruders.py'}:Env"
    with EnvPool(env, workers=1) as envs:
        envs.ask("start", {i: ({}, i) for i in range(len(texts))})
        replies = list(envs.ask("step", {i: {"role": "assistant", "content": t} for i, t in enumerate(texts)}).values())
    assert replies[0].messages["agent"][0]["content"] == "0.0"
    assert all(isinstance(reply, Failure) for reply in replies[1:3])
    assert replies[1].reason.endswith("name it in agent.variables")
    assert replies[2].reason.endswith("set agent.network to give it one")
    with EnvPool(env, workers=1, network=True) as envs:
        envs.ask("start", {0: ({}, 0)})
        (reply,) = envs.ask("step", {0: {"role": "assistant", "content": texts[2]}}).values()
    assert reply.messages["agent"][0]["content"] == "1.0"


def test_environments_of_several_agents_have_the_same_walls(judge, secret, tmp_path):
    code = f"""
        import os
        from intruders import connects
        seen = lambda: 1 / (1 - ('MY_API_TOKEN' in os.environ)) and connects('127.0.0.1:{judge}') and 1 / 0
        """
    (tmp_path / "spy.py").write_text(textwrap.dedent(code))
    for how, why in (({}, "set network to give it one"), ({"network": True}, "cannot be made: ZeroDivisionError")):
        with pytest.raises(UserError, match=why):
            open_envs(f"{tmp_path / 'spy.py'}:seen", 1, workers=1, **how)


TRAINER = textwrap.dedent(f"""
    import logging, os, socket, sys
    from pathlib import Path
    logging.basicConfig(format="%(message)s")
    from rolecall.rewards import RewardPool, Sample
    os.environ["MY_API_TOKEN"] = "7"
    server = socket.create_server(("127.0.0.1", 0))
    lock = os.path.join(sys.argv[1], "lock")
    port, pid = server.getsockname()[1], os.getpid()
    texts = ["environment MY_API_TOKEN", f"connects 127.0.0.1:{{port}}", f"sends_out 127.0.0.1:{{port}}"]
    texts += [f"opens /proc/{{pid}}/mem", f"opens /proc/{{pid}}/environ", f"signals {{pid}}", "orphans " + lock, "forks 5"]
    def scores(pool, texts):
        print([s.total for s in pool.score([Sample(prompt="q", completion=t) for t in texts])], flush=True)
    with RewardPool({ACT!r}) as pool:
        scores(pool, texts[:2])
    scores(RewardPool({ACT!r}), texts)
    os.kill(os.getpid(), 9)
    """)


def train(tmp_path, *before):
    (tmp_path / "trainer.py").write_text(TRAINER)
    command = [*before, sys.executable, str(tmp_path / "trainer.py"), str(tmp_path)]
    source = str(Path(pools.__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, cwd="/", check=False)
    assert done.returncode == -9, done.stderr
    assert done.stdout.splitlines() == ["[0.0, None]", "[0.0, None, 0.0, None, None, None, 1.0, 5.0]"]
    assert free(tmp_path / "lock"), "nothing outlives a trainer that was killed"
    return done.stderr


@pytest.mark.parametrize("who", ["root", "user"])
def test_where_the_kernel_refuses_namespaces_it_is_said_once_and_the_rest_holds(tmp_path, who):
    script = (
        "echo 0 > /proc/sys/user/max_pid_namespaces && echo 0 > /proc/sys/user/max_user_namespaces || exit 9; "
        'exec setpriv --inh-caps=-all --ambient-caps=-all "$@"'
    )
    ids = ["--map-root-user"] if who == "root" else ["--map-user=1000", "--map-group=1000", "--keep-caps"]
    before = ["unshare", "--user", *ids, "sh", "-c", script, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*before, "true"], capture_output=True).returncode:
        pytest.skip("namespaces cannot be forbidden here")
    if ctypes.CDLL(None).syscall(444, None, 0, 1) < 6:
        pytest.skip("this kernel has no Landlock, or one of before 6.12")
    said = train(tmp_path, *before)
    assert said.count("the kernel refuses namespaces") == 1, said


def test_an_ordinary_user_gets_namespaces_too(tmp_path):
    before = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    if shutil.which("unshare") is None or subprocess.run([*before, *before, "true"], capture_output=True).returncode:
        pytest.skip("this kernel refuses namespaces")
    assert "refuses" not in train(tmp_path, *before)
