"""Rollouts in a bucket, on an S3-compatible server of this machine. `make test-cluster` runs it."""

import os
import subprocess
import sys
import time

import pytest

from rolecall.experience.places import Place
from rolecall.experience.stored import RolloutStore

pytest.importorskip("s3fs", reason="needs rolecall[store]")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bucket():
    """The address of a bucket on an S3-compatible server of this machine."""
    made = pytest.importorskip("moto.server", reason="needs moto[server]")
    with pytest.MonkeyPatch.context() as patch:
        server = made.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        import boto3

        boto3.client("s3").create_bucket(Bucket="rollouts")
        yield "s3://rollouts"
        server.stop()


@pytest.fixture
def reward(tmp_path):
    path = tmp_path / "letters.py"
    path.write_text("def letters(completions, **_):\n    return [sum(map(ord, c)) % 7 / 6 for c in completions]\n")
    return f"{path}:letters"


def rl(out, *more, **how):
    command = [sys.executable, "-m", "rolecall", "rl", "--preset", "grpo", "--steps", "6", "--prompts", "2", "--samples", "4",
               "--rows", "addition", "--sampling.max_new_tokens", "4", "--save.every", "1", "--quiet", "--out", str(out), *more]  # fmt: skip
    return subprocess.Popen(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, text=True, **how)


def held(url):
    place = Place(url) / "rollouts"
    return {name: place.read(name) for name in place.names()}


def test_a_run_that_is_killed_and_resumed_leaves_the_same_bytes_in_the_bucket(bucket, reward, tmp_path):
    how = ("--reward", reward, "--store.merge", "4", "--save.rollouts", "2")
    assert rl(tmp_path / "whole", "--store.url", f"{bucket}/whole", *how).wait(timeout=300) == 0
    cut = rl(tmp_path / "cut", "--store.url", f"{bucket}/cut", *how)
    end, names = time.monotonic() + 300, []
    while time.monotonic() < end and not any("3" in name or "4" in name for name in names):
        time.sleep(0.05)
        names = (Place(f"{bucket}/cut") / "rollouts").names()
    cut.kill()
    cut.wait()
    assert rl(tmp_path / "cut", "--resume").wait(timeout=300) == 0
    whole = held(f"{bucket}/whole")
    assert sorted(whole) == ["step-000005.parquet", "step-000006.parquet", "steps-000001-000004.parquet"]
    assert held(f"{bucket}/cut") == whole
    assert len(list((tmp_path / "whole" / "rollouts").iterdir())) == 2, "the directory keeps what it was told to"

    trained = rl(tmp_path / "again", "--from", f"{bucket}/whole", "--steps", "2")
    assert trained.wait(timeout=300) == 0
    scored = [
        sys.executable,
        "-m",
        "rolecall",
        "rescore",
        "--reward",
        reward,
        f"{bucket}/whole",
        "--out",
        str(tmp_path / "rescored"),
        "--quiet",
    ]
    assert subprocess.run(scored, timeout=300, check=False).returncode == 0
    assert len(RolloutStore(tmp_path / "rescored")) == 6


@pytest.mark.parametrize(
    ("endpoint", "sentence"),
    [(None, "s3://missing/x/rollouts cannot be written: "), ("http://127.0.0.1:9", "s3://missing/x")],
)
def test_a_bucket_that_is_not_there_or_cannot_be_reached_is_one_sentence_within_seconds(
    bucket, tmp_path, monkeypatch, endpoint, sentence
):
    if endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    begun = time.monotonic()
    failed = rl(tmp_path / "run", "--store.url", "s3://missing/x", stderr=subprocess.PIPE)
    said = failed.communicate(timeout=300)[1].strip()
    assert failed.returncode == 2
    assert sentence in said
    assert "check the address, the network and your keys" in said
    assert len(said.splitlines()) == 1
    assert time.monotonic() - begun < 60, "15 s, and the start of Python on a busy machine"
    assert not (tmp_path / "run").exists()
