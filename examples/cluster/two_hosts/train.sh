#!/bin/bash
# On 10.0.0.1, then: ROLECALL_SERVER_KEY=... bash examples/cluster/two_hosts/train.sh. Started again, it resumes. Not run on GPUs.
set -euo pipefail
here=$(dirname "$0")
: "${ROLECALL_SERVER_KEY:?give both hosts the same key}"
for gpu in 0 1 2 3 4 5 6 7; do
  until curl --silent --fail --output /dev/null "http://10.0.0.2:$((8750 + gpu))/health"; do sleep 5; done
done
how=(--preset grpo --config "$here/config.yaml")
[ ! -f runs/grpo/config.json ] || how=(--resume)
torchrun --nproc_per_node 8 -m rolecall rl "${how[@]}" --out runs/grpo
