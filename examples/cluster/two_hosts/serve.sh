#!/bin/bash
# On 10.0.0.2, first: ROLECALL_SERVER_KEY=... bash examples/cluster/two_hosts/serve.sh
# Key and tokens cross the network in the clear: use one that you trust. Not run on GPUs.
set -euo pipefail
model=meta-llama/Llama-3.1-8B-Instruct
: "${ROLECALL_SERVER_KEY:?give both hosts the same key}"
for gpu in 0 1 2 3 4 5 6 7; do
  CUDA_VISIBLE_DEVICES=$gpu rolecall serve "$model" --vllm --dtype bfloat16 --host 10.0.0.2 --port $((8750 + gpu)) &
  [ "$gpu" != 0 ] || sleep 1 # the first one makes vLLM's environment
done
wait
