"""Two processes hold one buffer: each takes its share of what is drawn, and a resumed job goes on exactly."""

import json

from forked_ranks import processes

REWARD = "def letters(completions, **columns):\n    return [len(set(text)) / 6 for text in completions]\n"


def test_two_processes_replay_from_one_buffer_and_go_on_exactly(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARD)
    first = [
        "--rows",
        "sorting:length=2",
        "--reward",
        "rewards.py:letters",
        "--prompts",
        "4",
        "--samples",
        "4",
        "--quiet",
    ]
    first += ["--sampling.max_new_tokens", "6", "--optim.lr", "1e-3", "--save.every", "1"]
    first += ["--replay.share", "0.5", "--replay.sampler", "random", "--replay.replace_flat"]
    processes(2, tmp_path, "rl", *first, "--steps", "3", "--out", "runs/whole")
    processes(2, tmp_path, "rl", *first, "--steps", "2", "--out", "runs/broken")
    processes(2, tmp_path, "rl", "--steps", "3", "--out", "runs/broken", "--resume", "--quiet")
    lines = [json.loads(line) for line in (tmp_path / "runs/whole/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["replay/groups"] == 0
    assert lines[2]["replay/groups"] == 4
    assert lines[2]["replay/share"] == 0.5
    assert 4 < lines[2]["replay/held"] <= 8, "of 4 groups a step, those of both processes, counted once"
    again = [json.loads(line) for line in (tmp_path / "runs/broken/metrics.jsonl").read_text().splitlines()]
    assert lines == again
    weights = [tmp_path / "runs" / name / "model" / "model.safetensors" for name in ("whole", "broken")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
