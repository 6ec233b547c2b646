"""The files for clusters are read as their readers would: bash, YAML, torchrun's own parser and ours."""

import json
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
SLURM = (CLUSTER / "slurm" / "job.sbatch").read_text()
SERVICE, JOB = yaml.safe_load_all((CLUSTER / "kubernetes" / "job.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
SCRIPTS = {"slurm": SLURM, "kubernetes": POD["containers"][0]["args"][0]}
RANKS = {"lora_one_gpu": 1, "one_host": 4, "two_hosts": 8, "slurm": 16, "kubernetes": 16, "kuberay": 8}
"""Processes that train, by recipe."""
LLAMA = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
REWARD = "def my_reward(completions, **columns):\n    return [0.0] * len(completions)\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where the recipes are started: rows, a reward, and the config of a model of their size."""
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(REWARD)
    Path("prompts.jsonl").write_text('{"prompt": "1+1="}\n' * 128)
    Path("llama").mkdir()
    Path("llama/config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_every_recipe_is_in_the_table():
    page = (CLUSTER / "README.md").read_text()
    assert {path.parent.name for path in CLUSTER.glob("*/config.yaml")} == set(
        re.findall(r"^\| `(\w+)`", page, re.MULTILINE)
    )
    assert set(RANKS) == {path.parent.name for path in CLUSTER.glob("*/config.yaml")}


@pytest.mark.parametrize("name", RANKS)
def test_a_recipe_fits_and_its_dry_run_ends_well(name, place, monkeypatch, capsys):
    config = CLUSTER / name / "config.yaml"
    assert "# Not run on GPUs" in config.read_text()
    monkeypatch.setenv("WORLD_SIZE", str(RANKS[name]))
    assert main(["rl", "--preset", "grpo", "--config", str(config), "--model", "tiny", "--dry-run"]) == 0
    said = capsys.readouterr().out
    given = yaml.safe_load(config.read_text())
    assert f"ranks: {RANKS[name]}" in said
    monkeypatch.delenv("WORLD_SIZE")
    planned = shlex.split(re.search(r"# rolecall (plan .*)", config.read_text())[1])
    assert main([word.replace(given["model"], "llama") for word in planned]) == 0
    assert "never measured on a GPU" in capsys.readouterr().out
    words = dict(zip(planned[2::2], planned[3::2], strict=True))
    assert (int(words["--prompts"]), float(words["--longest"])) == (
        given["prompts"],
        given["sampling"]["max_new_tokens"],
    )
    assert int(words["--gpus"]) - int(words.get("--sample_gpus", 0)) == RANKS[name]


@pytest.mark.parametrize("path", sorted(CLUSTER.glob("*/*.sh")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_script_is_bash_and_starts_what_its_config_expects(path):
    text = path.read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert "Not run on GPUs" in text
    config = yaml.safe_load((path.parent / "config.yaml").read_text())
    for model in re.findall(r"^model=(.*)$", text, re.MULTILINE):
        assert model == config["model"]
    gpus = re.search(r"for gpu in ([\d ]+);", text)
    if gpus:
        ports = [8750 + int(gpu) for gpu in gpus[1].split()]
        assert ports == [int(url.rpartition(":")[2]) for url in config["engine"]["servers"]]
    for line in re.findall(r"rolecall serve (.*?)(?: &)?$", text, re.MULTILINE):
        words = shlex.split(line.replace('"$model"', "tiny").replace("$((8750 + gpu))", "8754"))
        assert main(["serve", *words, "--help"]) == 0
    for count in re.findall(r"--nproc_per_node (\d+)", text):
        assert int(count) == RANKS[path.parent.name]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_launcher_is_bash_and_its_commands_are_ones(name):
    assert subprocess.run(["bash", "-n"], input=SCRIPTS[name], text=True, check=False).returncode == 0
    text = SCRIPTS[name].replace("\\\n", " ")
    text = re.sub(r'"?\$(SLURM_NNODES)"?', "2", text)
    text = re.sub(r'"?\$(SLURM_NODEID|JOB_COMPLETION_INDEX)"?', "1", text)
    text = re.sub(r'"?\$(MASTER_PORT)"?', "29500", text)
    (line,) = re.findall(r"torchrun .*", text)
    first = re.search(r"how=\((--preset .*?)\)\n", text)[1]
    for how in (first, "--resume"):
        words = shlex.split(line.replace('"${how[@]}"', how).replace('"$RUN"', "runs/grpo"))
        given = parse_args(words[1:])
        assert (given.nnodes, given.node_rank, given.nproc_per_node) == ("2", 1, "8")
        assert (given.module, given.training_script) == (True, "rolecall")
        assert ("--config" if how == first else "--resume") in given.training_script_args


def test_kuberay_asks_for_what_its_config_places():
    job = yaml.safe_load((CLUSTER / "kuberay" / "rayjob.yaml").read_text())
    script = shlex.split(job["spec"]["entrypoint"])
    assert script[:2] == ["bash", "-ceu"]
    assert subprocess.run(["bash", "-n"], input=script[2], text=True, check=False).returncode == 0
    assert f"--nproc_per_node {RANKS['kuberay']} " in script[2]
    engine = yaml.safe_load((CLUSTER / "kuberay" / "config.yaml").read_text())["engine"]
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert engine["placed_servers"] * engine["server_gpus"] == group["replicas"] * limits["nvidia.com/gpu"]
    assert engine["placed_servers"] * engine["server_cpus"] <= group["replicas"] * limits["cpu"]
    assert job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0", "these train"
    assert f"ray=={job['spec']['rayClusterSpec']['rayVersion']}" in (ROOT / "constraints.txt").read_text()


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
