"""Every benchmark of speed, and docs/performance.md from what they found: `python benchmarks/performance.py`.

    --page      run nothing, only write the page from the last runs
    --repeats N turns of each comparison (3)

Runs one benchmark at a time; the machine should do nothing else. Needs the package index for the peers' environments,
which are made beside .venv at first use.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOUND = HERE.parent / "runs" / "bench"
PAGE = HERE.parent / "docs" / "performance.md"
MARK = "<!-- from here on: benchmarks/servers.py -->"
NAMES = (
    *("smollm2-fp32", "smollm2-bf16", "vllm", "ragged", "small-fp32", "small-bf16"),
    *("smollm2", "long-prompts", "small", "ppo", "to_ninety", "scaling"),
)
"""What the benchmarks write."""
WHY = {
    "smollm2-fp32": "Matrix products take most of the time; their share of the machine's limit stands further down.",
    "smollm2-bf16": "Matrix products take most of the time; their share of the machine's limit stands further down.",
    "smollm2-memory": "TRL is fastest with a quarter of the rows at a time, ours works on half of them; in smaller pieces "
    "(`optim.token_budget`) it takes less memory and more time. Weights, gradient and AdamW's moments stay.",
    "ppo": "Policy and critic need the same matrix products on both sides, four times over, and by torch's profiler these "
    "take the larger part of our step.",
}
"""Said of a comparison that misses what it must reach."""


def main() -> None:
    """Run, then write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    FOUND.mkdir(parents=True, exist_ok=True)
    if not given.page:
        begun = time.monotonic()
        repeats = ["--repeats", str(given.repeats)]
        work = [["limits.py"], ["generate.py", *repeats], ["step.py", *repeats], ["to_ninety.py"], ["scaling.py"]]
        for script, *arguments in work:
            since = time.monotonic()
            print(f"== {script}", flush=True)
            subprocess.run([sys.executable, str(HERE / script), *arguments], check=True)
            print(f"== {script}: {(time.monotonic() - since) / 60:.1f} minutes", flush=True)
        facts = {"minutes": (time.monotonic() - begun) / 60, "load": os.getloadavg()[0], "cores": os.cpu_count()}
        facts["machine"] = f"{_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        (FOUND / "facts.json").write_text(json.dumps(facts, indent=1))
    _, mark, servers = PAGE.read_text().partition(MARK)  # what another benchmark has made
    PAGE.write_text("\n".join(page()) + "\n" + ("\n" + mark + servers if mark else ""))
    print(f"{PAGE} written")


def page() -> list[str]:
    """The page, from the files that the benchmarks wrote."""
    facts, limit = _read("facts"), _read("limits")
    rows, notes = [], []
    for name, row in {**_read("generate"), **_read("step")}.items():
        rows.append(_row(row))
        if row["ratio"] < row["must"]:
            notes.append(
                f"- **{row['title']}** reaches {row['ratio']:.2f} of {row['must']}. {WHY.get(name, '')}".rstrip()
            )
        if not _small_enough(row):
            share = row["ours_gb"] / row["theirs_gb"]
            notes.append(
                f"- **{row['title']}** takes {share:.2f} of the peer's memory and must take {row['memory']}. "
                + WHY.get(f"{name}-memory", "")
            )
    if ninety := _read("to_ninety"):
        rows.append(_ninety(ninety))
        if not ninety["ratios"] or min(ninety["ratios"]) < ninety["must"]:
            ours, theirs = ([p[f"{side}_step"] for p in ninety["pairs"]] for side in ("ours", "theirs"))
            notes.append(
                f"- **Wall clock to 90 %** is {min(ninety['ratios'], default=0):.2f} in its worst seed, of {ninety['must']}. "
                f"Both get there within a few steps of a very small model: ours take {statistics.median(ours):.2f} s, "
                f"TRL's {statistics.median(theirs):.2f} s."
            )
    out = [
        "# Performance",
        "",
        "Made by `make bench` (`benchmarks/performance.py`), which measures ours and the peer's in turns in one run: on a",
        "shared machine only neighbours can be compared. Both sides have the same model, prompts, lengths, threads and,",
        "where it is installed, tcmalloc. A ratio is the median over turns, with the smallest and the largest.",
        "",
        f"Machine: {facts.get('machine', '?')}; the whole took {facts.get('minutes', 0):.0f} minutes.",
        *(
            [
                "Matrix products of 2048 x 2048 reach "
                f"{limit['float32'] / 1e9:.0f} GF/s in fp32 and {limit['bfloat16'] / 1e9:.0f} in bf16; memory is read at "
                f"{limit['read'] / 1e9:.0f} GB/s."
            ]
            if limit
            else []
        ),
        "",
        *_table(("work", "ours", "peer", "ratio", "must", "aim", "holds"), rows),
        "",
    ]
    if notes:
        out += ["What does not hold, and why:", "", *notes, ""]
    if missing := [name for name in NAMES if not _found(name)]:
        out += [f"Not measured in the last run: {', '.join(missing)}.", ""]
    return out + _peers() + _phases(limit) + _scaling() + _ranks()


def _found(name: str) -> bool:
    return name in {**_read("generate"), **_read("step")} or bool(_read(name))


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    if "ours_gb" in row:
        ours = f"{row['ours']:.2f} s, {row['ours_gb']:.1f} GB"
        peer = f"{row['peer']}: {row['theirs']:.2f} s, {row['theirs_gb']:.1f} GB"
    else:
        ours, peer = f"{row['ours']:,.0f} tok/s", f"{row['peer']}: {row['theirs']:,.0f} tok/s"
    low, high = row["range"]
    holds = "yes" if row["ratio"] >= row["must"] and _small_enough(row) else "**no**"
    memory = f", {row['memory']} of the memory" if row.get("memory", 1.0) < 1 else ""
    return (
        row["title"],
        ours,
        peer,
        f"{row['ratio']:.2f} ({low:.2f}-{high:.2f})",
        f"{row['must']}{memory}",
        f"{row['aim']}",
        holds,
    )


def _small_enough(row: dict[str, Any]) -> bool:
    return "ours_gb" not in row or row["ours_gb"] <= row["memory"] * row["theirs_gb"]


def _ninety(found: dict[str, Any]) -> tuple[str, ...]:
    ratios, pairs = sorted(found["ratios"]), found["pairs"]
    texts = [
        ", ".join("never" if p[side] is None else f"{p[side]:.1f} s" for p in pairs) for side in ("ours", "theirs")
    ]
    ratio = "" if not ratios else f"{ratios[len(ratios) // 2]:.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
    holds = "yes" if ratios and ratios[0] >= found["must"] else "**no**"
    title = "wall clock of GRPO to 90 % on `sorting`, by seed"
    return title, texts[0], f"TRL 1.16: {texts[1]}", ratio, f"{found['must']}", f"{found['aim']}", holds


def _peers() -> list[str]:
    lines = [
        f"- {row['title']}: {row['peer']} with `{json.dumps(row['peer_settings'])}`, the fastest of "
        + ", ".join(f"{seconds:.2f} s" for seconds in row["tried"].values())
        + "."
        for row in _read("step").values()
        if row["tried"]
    ]
    if lines and "trial" in (ninety := _read("to_ninety")):
        which = "with" if ninety["bf16"] else "without"
        lines.append(
            f"- wall clock to 90 %: TRL 1.16 {which} bf16, the faster of {ninety['trial'][0]:.3f} s a step without and "
            f"{ninety['trial'][1]:.3f} s with it."
        )
    more = [
        "## How the peers were run",
        "",
        "transformers' generate uses the faster of its dynamic and static caches. TRL runs with the fastest of the settings",
        "that were tried:",
        "",
        *lines,
        "",
        "Ours samples in bf16 and trains with bf16 products, fp32 master weights and an fp32 residual stream. GRPO takes one",
        "optimiser step per rollout, so the old log-probs are the trainer's own and the sampler's rounding does not enter the",
        "ratio; PPO scores the answers again before its epochs, and that time is part of the step (its first epoch goes on",
        "from that pass). The reward model computes in fp32 on both sides. Ours works on half of the rows of the first GRPO step at",
        "a time (`optim.token_budget 1500`), elsewhere on as many as the default of 8,192 tokens holds.",
        "",
    ]
    return more if lines else []


def _phases(limit: dict[str, float]) -> list[str]:
    rows = []
    for row in _read("step").values():
        phases = row["phases"]
        whole = phases["step_time"]
        parts = {k: phases[k] for k in ("generate", "reward", "score", "update", "sync") if k in phases}
        rows.append((row["title"], f"{whole:.2f} s", *(f"{100 * v / whole:.0f} %" for v in parts.values())))
        names = tuple(parts)
    out = ["## Where a step's time goes", ""]
    if rows:
        out += [
            *_table(("work", "step", *names), rows),
            "",
            "`sync`, new weights for the sampler, is part of `update`.",
            "",
        ]
    shares = [
        (r["title"], *(f"{100 * r[kind]:.0f} %" for kind in ("gemm_share", "read_share")))
        for r in _read("generate").values()
        if "read_share" in r
    ]
    if shares and limit:
        out += [
            "Sampling, as shares of the machine's limits: its matrix products, and reading the weights at every step and the",
            "cached keys and values of every answer. A prompt's products count, its bytes do not.",
            "",
        ]
        out += [*_table(("work", "products", "memory"), shares), ""]
    return out


def _scaling() -> list[str]:
    found = _read("scaling")
    if not found:
        return []
    out = ["## How cost and memory grow", "", "GRPO in fp32, 4 layers x 256, prompts of 32 tokens, 8 answers each:", ""]
    both = [("answers of 64 tokens", size, row) for size, row in found["batches"].items()]
    both += [("2,048 answers' tokens, each answer of", size, row) for size, row in found["lengths"].items()]
    rows = [
        (f"{size} {kind}" if kind[0] == "a" else f"8 x {kind} {size}", f"{row['generate']:.0f}", f"{row['update']:.0f}")
        for kind, size, row in both
    ]
    out += [*_table(("step", "sampling, µs per token", "update, µs per token"), rows), ""]
    out += [
        "Peak memory of a process that trains on 64 answers; *above* is what weights, gradient and optimiser do not explain;",
        "*logits* is what all logits at once would take:",
        "",
    ]
    rows = [
        (name, f"{row['peak']:.2f} GB", f"{row['above']:.2f} GB", f"{row['logits']:.2f} GB")
        for name, row in found["memory"].items()
    ]
    out += [*_table(("vocabulary x length", "peak", "above", "logits"), rows), ""]
    out += ["Start-up: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found["start"].items()) + "."]
    return [
        *out,
        "",
        "## Settings that matter on a CPU",
        "",
        "- `policy.mixed_precision bf16` with `engine.dtype bfloat16`: about twice as fast where the CPU has bf16 products",
        "  (`rolecall env` says so).",
        "- tcmalloc (`apt-get install libtcmalloc-minimal4`, then `LD_PRELOAD`): `rolecall env` names the allocator in use.",
        "- `OMP_WAIT_POLICY`: the command line sets `PASSIVE`, which is right beside other work. On a machine of its own",
        "  `OMP_WAIT_POLICY=ACTIVE` makes small models about 1.5 times faster; beside other work it makes them ten times slower.",
    ]


def _ranks() -> list[str]:
    """What `benchmarks/ranks.py` found, which is run by itself."""
    found = _read("ranks")
    if not found:
        return []
    head = ("job", "way", "peak of a process", "of one process's", "seconds a step", "of one process's")
    return [
        "",
        "## Several processes",
        "",
        f"`python benchmarks/ranks.py --repeat {found['repeat']}`: SmolLM2-135M in fp32, one core to each process; two processes share a step,",
        "holding the model whole (ddp) or in parts (fsdp2). Of a sharded process at most 0.65 of one process's memory is allowed.",
        "",
        *_table(head, found["rows"]),
        "",
        "Memory is what was measured for; times were taken on two cores that others used too, so they only say that gathering layers",
        "costs on a CPU.",
    ]


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def _read(name: str) -> dict[str, Any]:
    path = FOUND / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
