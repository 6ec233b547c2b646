"""verl's rows and verl's compute_score, both unchanged."""

import tempfile

from steps import steps

import rolecall


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str.strip() == ground_truth
    digits = sum(map(str.isdigit, solution_str)) / max(1, len(solution_str))
    return {"score": 1.0 if right else 0.1 * digits, "index": extra_info["index"], "source": data_source}


rows = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{n}+1="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"split": "train", "index": n},
    }
    for n in range(32)
]

if __name__ == "__main__":
    run = rolecall.rl(
        model="tiny",
        rows=rows,
        reward=compute_score,
        steps=steps(20),
        prompts=4,
        samples=4,
        sampling={"max_new_tokens": 4},
        out=f"{tempfile.mkdtemp()}/verl",
    )
    print("mean score:", run.metrics[-1]["rewards/compute_score/mean"])
