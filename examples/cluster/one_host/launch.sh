#!/bin/bash
# bash examples/cluster/one_host/launch.sh, where prompts.jsonl and rewards.py are. Started again, it resumes. Not run on GPUs.
set -euo pipefail
here=$(dirname "$0")
model=meta-llama/Llama-3.1-8B-Instruct
ROLECALL_SERVER_KEY=$(python3 -c 'import secrets; print(secrets.token_urlsafe(24))')
export ROLECALL_SERVER_KEY

servers=()
trap 'kill "${servers[@]}"' EXIT
for gpu in 4 5 6 7; do
  CUDA_VISIBLE_DEVICES=$gpu rolecall serve "$model" --vllm --dtype bfloat16 --port $((8750 + gpu)) &
  servers+=($!)
  [ "$gpu" != 4 ] || sleep 1 # the first one makes vLLM's environment
done
for gpu in 4 5 6 7; do
  until curl --silent --fail --output /dev/null "http://127.0.0.1:$((8750 + gpu))/health"; do sleep 5; done
done

how=(--preset grpo --config "$here/config.yaml")
[ ! -f runs/grpo/config.json ] || how=(--resume)
CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc_per_node 4 -m rolecall rl "${how[@]}" --out runs/grpo
