#!/bin/bash
# bash examples/cluster/lora_one_gpu/launch.sh, where prompts.jsonl and rewards.py are. Started again, it resumes. Not run on GPUs.
set -euo pipefail
how=(--preset grpo --config "$(dirname "$0")/config.yaml")
[ ! -f runs/lora/config.json ] || how=(--resume)
rolecall rl "${how[@]}" --out runs/lora
