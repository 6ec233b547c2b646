"""Reward functions that take one answer are called as episodes end, those that take all get them in their order."""

import json
import time
from pathlib import Path

import rolecall
from rolecall.tasks.env import Step

HERE = Path(__file__)


class Waits:
    """Its episode ends when a reward was given for another's, or after a while; only the former is worth something."""

    def reset(self, row, seed):
        self.row = row
        return "go"

    def step(self, message):
        if not self.row["waits"] or message["content"] == "0":  # which is said in the dry episode
            return Step(reward=1.0, done=True)
        end = time.monotonic() + 30
        while not (found := Path(self.row["scored"]).exists()) and time.monotonic() < end:
            time.sleep(0.01)
        return Step(reward=float(found), done=True)


def one(completion, scored):
    Path(scored).touch()
    return 0.5


def all_of_them(completions, number, **_):
    return [float(i * n) for i, n in enumerate(number)]


def run(out, *rewards):
    rows = [{"waits": i == 0, "number": i, "scored": str(out / "scored")} for i in range(2)]
    (out / "scored").unlink(missing_ok=True)
    how = {"model": "tiny", "prompts": 2, "samples": 2, "sampling.max_new_tokens": 4, "steps": 1, "agent.workers": 4}
    rolecall.rl(env=f"{HERE}:Waits", rows=rows, reward=[f"{HERE}:{r}" for r in rewards], out=str(out / "run"), **how)
    (line,) = (out / "run" / "metrics.jsonl").read_text().splitlines()
    return json.loads(line)


def test_an_episode_is_scored_while_another_is_played(tmp_path):
    found = run(tmp_path, "one", "all_of_them")
    assert found["rewards/env/mean"] == 1.0, "the waiting episodes saw that another was scored"
    assert found["rewards/one/mean"] == 0.5
    assert found["rewards/all_of_them/mean"] == (0 * 0 + 0 * 1 + 1 * 2 + 1 * 3) / 4, "in the order of the rows"
