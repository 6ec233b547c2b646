"""Read the rollouts of a run elsewhere, row by row, without rolecall: by Hugging Face datasets, and by Ray Data if it is installed
(pip install 'rolecall[ray,store]').

A run copies its rollouts to any address that fsspec knows. Here that is a folder; with a bucket it is s3://bucket/name.
"""

import importlib.util
import os
import tempfile
from statistics import fmean

import fsspec
from datasets import load_dataset
from steps import steps

import rolecall


def digits(completions, **kwargs):
    """The share of an answer's characters that are digits."""
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


if __name__ == "__main__":
    url = f"file://{tempfile.mkdtemp()}/experience"
    store = {"url": url, "merge": 2}
    out = f"{tempfile.mkdtemp()}/experience"
    rolecall.rl(rows="addition", reward=digits, steps=steps(5), prompts=4, store=store, out=out)

    # Files of two steps each, and a file of its own for a step that is not merged yet: rows are the same in both.
    fs, place = fsspec.core.url_to_fs(f"{url}/rollouts")
    files = [fs.unstrip_protocol(path) for path in sorted(fs.glob(f"{place}/*.parquet"))]
    rows = load_dataset("parquet", data_files=files, split="train", streaming=True)
    best = max(rows, key=lambda row: row["score"])
    print(f"{len(files)} files; best answer, step {best['step']}: {best['answer_text']!r} scored {best['score']}")

    scores: dict[int, list[float]] = {}
    for row in rows:
        scores.setdefault(row["step"], []).append(row["score"])
    print("mean score by step, from datasets:", {step: round(fmean(scores[step]), 3) for step in sorted(scores)})

    if importlib.util.find_spec("ray") and "STEPS" not in os.environ:
        import ray

        ray.init(num_cpus=2, include_dashboard=False)
        read = ray.data.read_parquet(files).select_columns(["step", "score"])
        found = read.groupby("step").mean("score").take_all()
        means = {row["step"]: round(row["mean(score)"], 3) for row in sorted(found, key=lambda row: row["step"])}
        print("mean score by step, from Ray Data:", means)
        ray.shutdown()
