"""Draw docs/demo.svg from the runs that `rolecall demo` left: `python benchmarks/draw_demo.py runs/demo-1`.

Bars: the share of held-out problems each model gets right, greedy answers. Line: the mean reward of GRPO by step. Needs
no plotting library; the numbers are measured anew from the saved models.
"""

import json
import sys
from pathlib import Path

import rolecall

_NAMES = {"sft": "SFT", "ppo": "PPO", "grpo": "GRPO"}
_COLOURS = {"sft": "#8a8f98", "ppo": "#3b7dd8", "grpo": "#2a9d5c"}
_FONT = 'font-family="sans-serif" font-size="13" fill="#57606a"'


def draw(accuracy: dict[str, float], rewards: list[float]) -> str:
    """The picture as SVG: bars on the left, the line on the right."""
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 260" width="720" height="260">']
    parts.append('<rect width="720" height="260" rx="6" fill="#ffffff"/>')
    parts.append(f'<text x="30" y="28" {_FONT}>held-out problems right, greedy answers</text>')
    for i, (name, share) in enumerate(accuracy.items()):
        x, height = 50 + 90 * i, 160 * share
        parts.append(
            f'<rect x="{x}" y="{215 - height:.1f}" width="56" height="{height:.1f}" fill="{_COLOURS[name]}"/>'
            f'<text x="{x + 28}" y="{208 - height:.1f}" text-anchor="middle" {_FONT}>{share:.1%}</text>'
            f'<text x="{x + 28}" y="235" text-anchor="middle" {_FONT}>{_NAMES[name]}</text>'
        )
    parts.append('<line x1="30" y1="215" x2="320" y2="215" stroke="#d0d7de"/>')
    parts.append(f'<text x="390" y="28" {_FONT}>GRPO: mean reward by step</text>')
    for level in (0.0, 0.5, 1.0):
        y = 215 - 160 * level
        parts.append(f'<line x1="390" y1="{y}" x2="690" y2="{y}" stroke="#eaeef2"/>')
        parts.append(f'<text x="383" y="{y + 4}" text-anchor="end" {_FONT}>{level:g}</text>')
    last = max(1, len(rewards) - 1)
    points = " ".join(f"{390 + 300 * i / last:.1f},{215 - 160 * reward:.1f}" for i, reward in enumerate(rewards))
    parts.append(f'<polyline points="{points}" fill="none" stroke="{_COLOURS["grpo"]}" stroke-width="2"/>')
    parts.append(f'<text x="390" y="235" {_FONT}>1</text>')
    parts.append(f'<text x="690" y="235" text-anchor="end" {_FONT}>{len(rewards)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Evaluate the demo's three policies and write the picture."""
    place, out = Path(sys.argv[1]), Path(__file__).parents[1] / "docs" / "demo.svg"
    accuracy = {
        name: rolecall.eval(model=str(place / name), rows="sorting", n=400, sampling={"max_new_tokens": 8}).numbers[
            "accuracy"
        ]
        for name in _NAMES
    }
    lines = map(json.loads, (place / "grpo" / "metrics.jsonl").read_text().splitlines())
    out.write_text(draw(accuracy, [line["reward"] for line in lines if "reward" in line]))
    print(f"{out}: {accuracy}")


if __name__ == "__main__":
    main()
