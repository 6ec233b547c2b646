"""Processes that do not come together, or were not started as they should be: a sentence and an exit code, in time."""

import socket
import socketserver
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch
from forked_ranks import ended, forked, ranks
from safetensors.torch import load_file

import rolecall
from rolecall.train import peers

SFT = ["sft", "--rows", "addition", "--steps", "1", "--batch", "4", "--quiet", "--out", "run"]
QUICK = ["--rank-timeout", "1.5"]


def sentence(told: str) -> str:
    assert "Traceback" not in told
    (line,) = [line for line in told.splitlines() if line.startswith("rolecall sft: ")]
    return line.removeprefix("rolecall sft: ")


@pytest.mark.parametrize(
    ("rank", "variables", "says"),
    [
        (
            0,
            {},
            "only 1 of the 2 processes of this job came at 127.0.0.1:{port} within 1.5 s (rank_timeout): start all 2",
        ),
        (1, {}, "rank 1 cannot reach 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT), tried for 1.5 s (rank_timeout)"),
        (1, {"MASTER_ADDR": "no-such-host.invalid"}, "rank 1 cannot reach no-such-host.invalid:{port}"),
    ],
    ids=["nobody else comes", "no master", "an unknown master"],
)
def test_a_process_whose_peers_do_not_come_ends_with_75_within_the_timeout(tmp_path, capfd, rank, variables, says):
    given, begun = ranks(2)[rank], time.monotonic()
    assert ended([forked({**given, **variables}, tmp_path, *SFT, *QUICK)]) == [75]
    assert time.monotonic() - begun < 20, "the rest is this machine being busy"
    assert sentence(capfd.readouterr().err).startswith(says.format(port=given["MASTER_PORT"]))
    assert not (tmp_path / "run").exists()


def test_a_port_that_something_else_uses_is_named_on_the_host_of_rank_0_and_given_up_on_elsewhere(tmp_path, capfd):
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = str(other.getsockname()[1])
        first, second = ({**one, "MASTER_PORT": port} for one in ranks(2))
        assert ended([forked(first, tmp_path, *SFT, *QUICK)]) == [2]
        assert sentence(capfd.readouterr().err).startswith(
            f"port {port} (MASTER_PORT) is taken on this host: give another"
        )
        assert ended([forked(second, tmp_path, *SFT, *QUICK)]) == [75], "it accepts connections and never answers"
        assert sentence(capfd.readouterr().err).startswith(
            f"this job cannot come together at 127.0.0.1:{port} within 1.5 s"
        )


class Garbles(socketserver.BaseRequestHandler):
    """Answers whatever it is asked with the same words."""

    def handle(self):
        with suppress(OSError):  # the other side goes away
            while self.request.recv(1024):
                self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_an_address_where_something_else_answers_is_one_line_too(tmp_path, capfd):
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Garbles) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        given = {**ranks(2)[1], "MASTER_PORT": str(other.server_address[1])}
        assert ended([forked(given, tmp_path, *SFT, *QUICK)]) == [75]
        other.shutdown()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"rolecall sft: this job cannot come together at 127.0.0.1:{given['MASTER_PORT']}")


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"MASTER_ADDR": ""}, "WORLD_SIZE is 2, but MASTER_ADDR is not set: start all processes with torchrun"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT is 'x', not a number"),
        ({"RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2: ranks count from 0 to 1"),
        ({"WORLD_SIZE": "5"}, "batch is 4, which 5 processes cannot share: give at least 5, or start fewer processes"),
    ],
)
def test_a_launcher_that_says_what_cannot_be_is_refused(tmp_path, capfd, variables, says):
    assert ended([forked({**ranks(2)[0], **variables}, tmp_path, *SFT, *QUICK)]) == [2]
    assert sentence(capfd.readouterr().err).startswith(says)


def test_more_processes_than_prompts_of_a_step_are_refused(tmp_path, capfd):
    words = ["rl", "--rows", "addition", "--prompts", "1", "--steps", "1", "--train.shard", "fsdp2", "--out", "run"]
    assert ended([forked(one, tmp_path, *words) for one in ranks(2)]) == [2, 2]
    told = capfd.readouterr().err
    assert told.count("prompts is 1, which 2 processes cannot share: give at least 2, or start fewer processes") == 2
    assert "Traceback" not in told
    assert not (tmp_path / "run").exists()


def test_accelerate_launch_is_refused_with_the_line_to_use(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setattr(sys, "argv", ["/bin/rolecall", "sft", "--out", "my runs/1"])
    assert ended([forked({}, tmp_path, *SFT)]) == [2]
    line = "torchrun --nproc_per_node N -m rolecall sft --out 'my runs/1'"
    assert sentence(capfd.readouterr().err).endswith(f"whose settings would not be used; start it with: {line}")
    monkeypatch.setattr(sys, "argv", ["train.py", "7"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(rolecall.errors.UserError, match=r"start it with: torchrun --nproc_per_node 4 train\.py 7$"):
        peers.refuse_accelerate()


def test_ranks_with_other_code_are_refused(tmp_path, capfd):
    here, there = ranks(2)

    def other_code():
        from rolecall.jobs import running

        running.code_hash = lambda: "another"

    children = [forked(here, tmp_path, *SFT), forked(there, tmp_path, *SFT, before=other_code)]
    assert ended(children) == [2, 2]
    told = capfd.readouterr().err
    assert "Traceback" not in told
    assert f"rolecall code (sha256) is '{peers.code_hash()}' on rank 0 and 'another' on rank 1" in told
    assert not (tmp_path / "run").exists()


def twice(*_):
    for name in ("first", "second"):
        rolecall.sft(rows="addition", steps=1, batch=4, quiet=True, out=name)
    return 0


@pytest.mark.slow
def test_a_script_may_train_several_times_in_the_same_processes(tmp_path):
    assert ended([forked(one, tmp_path, call=twice) for one in ranks(2)]) == [0, 0]
    first, second = (load_file(tmp_path / name / "model/model.safetensors") for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_directory_that_only_some_hosts_see_is_refused_before_anything_trains(tmp_path, capfd):
    """Each process has a place of its own, and `--out run` is a different directory in each."""
    places = [tmp_path / "here", tmp_path / "there"]
    for place in places:
        place.mkdir()
    words = [*SFT, "--train.shard", "fsdp2"]
    children = [forked(one, place, *words) for one, place in zip(ranks(2), places, strict=True)]
    assert ended(children) == [2, 2]
    told = capfd.readouterr().err
    assert "Traceback" not in told
    assert "rank 1" in told
    assert "does not see run" in told
