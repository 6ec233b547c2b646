"""Whether the code does what another commit's did: every command is run by both, and what they print and write is compared.

    python benchmarks/frozen.py --against COMMIT [--only WORD]

Files are compared byte by byte (weights, metrics, records, settings, checkpoints), pages and clocks apart. Runs that the other
commit began are also resumed by both. Prints what differs and exits with 1 if anything does.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLOCKS = (".html", "timing.jsonl")
"""How files end that hold times, or are pages drawn from them."""

REWARDS = """
def near(completions, answer, **kwargs):
    return [sum(a == b for a, b in zip(text, right)) + len(text) / 100 for text, right in zip(completions, answer)]

def shorter(completion_text):
    return -float(len(completion_text))
"""
ENV = """
from rolecall.tasks.env import Step

class Longer:
    def reset(self, row, seed):
        self.left = 2
        return "1 to 9"

    def step(self, message):
        self.left -= 1
        return Step(messages="again", reward=len(message["content"]) / 10, done=not self.left)
"""
SHORT = "--prompts 2 --samples 4 --sampling.max_new_tokens 6 --save.every 1"
ROWS = "--rows rows.jsonl --reward rewards.py:near"
RL = f"rl {ROWS} {SHORT} --steps 2"

RUNS = {
    "sft": "sft --rows sorting:length=3 --batch 4 --steps 3 --save.every 1 --eval.every 2 --eval.rows 4",
    "sft-messages": "sft --rows chat.jsonl --batch 2 --steps 2",
    "sft-lora": "sft --rows sorting:length=3 --batch 4 --steps 2 --policy.lora_rank 4",
    "rm": "rm --rows sorting:length=3 --batch 4 --steps 2 --save.every 1",
    "rm-pairs": "rm --rows pairs.jsonl --batch 2 --steps 2",
    "dpo": "dpo --rows pairs.jsonl --batch 2 --steps 2 --save.every 1",
    "grpo": f"{RL} --preset grpo --eval.every 1 --eval.held_out 0.3 --eval.rows 4",
    "grpo-kl": f"{RL} --preset grpo --algorithm.kl_coef 0.1",
    "grpo-lora": f"{RL} --preset grpo --policy.lora_rank 4",
    "grpo-bf16": f"{RL} --preset grpo --policy.mixed_precision bf16",
    "grpo-hf": f"{RL} --preset grpo --engine.name hf",
    "grpo-cut": f"{RL} --preset grpo --sampling.top_p 0.8",
    "dr-grpo": f"{RL} --preset dr-grpo",
    "dapo": f"{RL} --preset dapo",
    "gspo": f"{RL} --preset gspo",
    "rloo": f"{RL} --preset rloo",
    "reinforce": f"{RL} --preset reinforce",
    "ppo": f"{RL} --preset ppo",
    "alpacafarm-ppo": f"{RL} --preset alpacafarm-ppo",
    "replay": f"{RL} --preset grpo --replay.share 0.5 --replay.max_uses 1",
    "replay-shaped": f"{RL} --preset grpo --replay.share 0.5 --replay.mode shaped",
    "env": f"rl --env guessing {SHORT} --steps 2",
    "own-environment": f"rl --env longer.py:Longer {SHORT} --steps 2",
    "players": f"rl --env kuhn {SHORT} --steps 2",
    "best-of-n": f"best-of-n {ROWS} --n 4 --sampling.max_new_tokens 4",
    "expert-iteration": f"expert-iteration {ROWS} --sampling.max_new_tokens 4 --steps 2",
    "qmix": "marl --env climbing --algo qmix --steps 3 --episodes 8 --q.updates 2 --save.every 1",
    "mappo": "marl --env climbing --algo mappo --steps 3 --episodes 8 --save.every 1",
    "ippo-recurrent": "marl --env lbf:5x5-2p-1f --algo ippo --steps 2 --episodes 4 --agent.recurrent",
    "vdn": "marl --env climbing --algo vdn --steps 2 --episodes 8 --q.updates 2",
    "iql": "marl --env climbing --algo iql --steps 2 --episodes 8 --q.updates 2",
}
"""Commands that make a run, by its name."""

LOOKS = {
    "audit": f"audit {ROWS} --json",
    "rescore": "rescore grpo --reward rewards.py:shorter --out rescored",
    "eval": "eval --model grpo --rows sorting:length=3 --n 4 --json",
    "generate": "generate --model grpo --prompt 'sort cab: ' --sampling.max_new_tokens 8 --seed 1",
    "generate-tokens": "generate --model grpo --prompt 'sort cab: ' --sampling.max_new_tokens 8 --seed 1 --show tokens",
    "play": "play --model env --env guessing --sampling.max_new_tokens 4 --seed 1",
    "report": "report grpo --out page.html",
    "push": "push grpo me/it --dry-run",
}
RESUMED = ("sft", "rm", "dpo", "grpo", "ppo", "replay", "env", "qmix", "mappo")
"""Runs that are prolonged by another step, with all that their checkpoints hold."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="HEAD~1", help="the commit to compare with")
    parser.add_argument("--only", default="", help="runs whose name holds this word")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        with os.fdopen(given.answer, "w") as answer:
            json.dump(one_side(given.side, given.only), answer)
        return 0
    with tempfile.TemporaryDirectory() as place:
        old, begun, theirs, ours, fresh = (
            Path(place) / name for name in ("old-code", "begun", "theirs", "ours", "fresh")
        )
        source = subprocess.run(["git", "archive", given.against, "src"], cwd=ROOT, check=True, capture_output=True)
        with tarfile.open(fileobj=io.BytesIO(source.stdout)) as archive:
            archive.extractall(old, filter="data")
        before = beside(old, begun, "make", given.only)
        shutil.copytree(begun, theirs, symlinks=True)
        shutil.copytree(begun, ours, symlinks=True)
        wrong = differences(before, beside(ROOT, fresh, "make", given.only), "made")
        again = [beside(code, runs, "resume", given.only) for code, runs in ((old, theirs), (ROOT, ours))]
        wrong += differences(*again, "resumed")
    print(*wrong, sep="\n")
    print(f"{len(before)} things compared with {given.against}: {len(wrong)} differ")
    return 1 if wrong else 0


def beside(code: Path, place: Path, what: str, only: str) -> dict[str, str]:
    """What the code in one place makes, in a process of its own."""
    place.mkdir(exist_ok=True)
    print(f"{what} with {code.name}", flush=True)
    read, write = os.pipe()
    place_of_code = {"PYTHONPATH": str(code / "src"), "PYTHONSAFEPATH": "1"}
    environment = {**os.environ, **place_of_code, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, str(Path(__file__).resolve()), "--side", what, "--only", only, "--answer", str(write)]
    with subprocess.Popen(command, cwd=place, env=environment, pass_fds=[write]):
        os.close(write)
        with os.fdopen(read) as answer:
            return dict(json.loads(answer.read()))


def one_side(what: str, only: str) -> dict[str, str]:
    """Name -> what it printed, or the digest of a file, after all commands have been run here."""
    import rolecall
    from rolecall.cli import COMMANDS
    from rolecall.cli import main as command_line

    found: dict[str, str] = {}

    def run(name: str, words: list[str]) -> None:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = command_line(words)
        found[f"{name}: says"] = f"{code}\n{sayings(out.getvalue())}"

    chosen = [name for name in RUNS if only in name]
    if what == "make":
        write_inputs()
        for command in COMMANDS if not only else ():
            run(f"{command.name} --help", [command.name, "--help"])
        for name in chosen:
            run(f"{name} --dry-run", [*shlex.split(RUNS[name]), "--out", name, "--dry-run"])
            run(name, [*shlex.split(RUNS[name]), "--out", name, "--quiet"])
        for name in LOOKS if not only else ():
            run(name, shlex.split(LOOKS[name]))
    else:
        for name in [name for name in chosen if name in RESUMED]:
            run(f"{name} resumed", [shlex.split(RUNS[name])[0], "--out", name, "--resume", "--steps", "+1", "--quiet"])
    for file in sorted(Path().rglob("*")):
        if file.is_file() and not file.name.endswith(CLOCKS) and "__pycache__" not in file.parts:
            found[str(file)] = hashlib.sha256(content(file)).hexdigest()
    assert Path(rolecall.__file__).is_relative_to(os.environ["PYTHONPATH"])
    return found


def content(file: Path) -> bytes:
    """A file's bytes; of settings what they say, in whatever order."""
    if file.name in ("config.json", "manifest.json"):
        return json.dumps(json.loads(file.read_text()), sort_keys=True).encode()
    return file.read_bytes()


def sayings(text: str) -> str:
    """Printed text without durations."""
    return re.sub(r"\d+(\.\d+)? ?(s|ms|seconds|min|tokens/s)\b", "TIME", text.replace(str(Path.cwd()), "HERE"))


def write_inputs() -> None:
    letters = ["cab", "bca", "acb", "dba", "cda", "bad"]
    rows = [{"prompt": f"sort {word}: ", "answer": "".join(sorted(word))} for word in letters]
    chat = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["answer"]}]}
        for row in rows
    ]
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": row["answer"][::-1]} for row in rows]
    for name, lines in (("rows", rows), ("chat", chat), ("pairs", pairs)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path("rewards.py").write_text(REWARDS)
    Path("longer.py").write_text(ENV)


def differences(old: dict[str, str], new: dict[str, str], what: str) -> list[str]:
    wrong = []
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if before != after:
            how = "only there" if after is None else "only here" if before is None else "differs"
            wrong.append(f"{what} {name}: {how}")
            if name.endswith(": says") and before and after:
                lines = zip([*before.splitlines(), ""], [*after.splitlines(), ""], strict=False)
                wrong += [f"    - {a}\n    + {b}" for a, b in lines if a != b][:3]
    return wrong


if __name__ == "__main__":
    sys.exit(main())
