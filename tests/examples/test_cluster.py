"""The files for clusters are read as their readers would: bash, YAML, torchrun's own parser and ours."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import parse_args

from rolecall.cli import main

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples/cluster"
SLURM = (CLUSTER / "slurm.sbatch").read_text()
SERVICE, JOB = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
SCRIPTS = {"slurm": SLURM, "kubernetes": POD["containers"][0]["args"][0]}
REWARD = "def my_reward(completions, **columns):\n    return [0.0] * len(completions)\n"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_bash_and_its_commands_are_ones(name, tmp_path, monkeypatch, capsys):
    assert subprocess.run(["bash", "-n"], input=SCRIPTS[name], text=True, check=False).returncode == 0
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(REWARD)
    Path("prompts.jsonl").write_text('{"prompt": "1+1="}\n' * 128)
    text = SCRIPTS[name].replace("\\\n", " ")
    text = re.sub(r'"?\$(SLURM_NNODES)"?', "2", text)
    text = re.sub(r'"?\$(SLURM_NODEID|JOB_COMPLETION_INDEX)"?', "1", text)
    text = re.sub(r'"?\$(MASTER_PORT)"?', "29500", text)
    (line,) = re.findall(r"torchrun .*", text)
    first = (
        re.search(r"how=\((--preset .*)\)", text)[1]
        .replace('"$MODEL"', "tiny")
        .replace("--model model", "--model tiny")
    )
    for how in (first, "--resume"):
        words = shlex.split(line.replace('"${how[@]}"', how).replace('"$RUN"', "runs/grpo"))
        given = parse_args(words[1:])
        assert (given.nnodes, given.node_rank, given.nproc_per_node) == ("2", 1, "8")
        assert (given.module, given.training_script) == (True, "rolecall")
        if how == first:
            monkeypatch.setenv("WORLD_SIZE", "16")
            assert main([*given.training_script_args, "--dry-run"]) == 0
            assert "ranks: 16, each with 8 to 8 of the 128 prompts" in capsys.readouterr().out
        else:
            assert "--resume" in given.training_script_args


def test_slurm_asks_for_one_launcher_per_node_and_warns_before_it_kills():
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", SLURM, re.MULTILINE))
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("2", "1", "8")
    grace = int(re.search(r"--grace (\d+)", SLURM)[1])
    assert grace < int(asked["signal"].partition("@")[2])
    assert "requeue" in asked


def test_kubernetes_pods_find_the_first_one_and_have_time_to_save():
    assert (SERVICE["kind"], JOB["kind"], SERVICE["spec"]["clusterIP"]) == ("Service", "Job", "None")
    assert SERVICE["metadata"]["name"] == POD["subdomain"]
    assert SERVICE["spec"]["selector"] == {"job-name": JOB["metadata"]["name"]}
    assert JOB["spec"]["completionMode"] == "Indexed"
    assert JOB["spec"]["completions"] == JOB["spec"]["parallelism"] == 2
    script = SCRIPTS["kubernetes"]
    assert f"--master_addr {JOB['metadata']['name']}-0.{POD['subdomain']} " in script
    assert int(re.search(r"--grace (\d+)", script)[1]) < POD["terminationGracePeriodSeconds"]
    mounts = {mount["name"] for mount in POD["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in POD["volumes"]}
