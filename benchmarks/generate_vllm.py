"""Sampling with vLLM, when told: driven by generate.py, run by vLLM's own Python. Imports nothing of ours."""

import json
import sys
import time

from turns import take_turn
from vllm import LLM, SamplingParams


def main(s):
    """The prompts of each turn are drawn from the same range of tokens, every answer runs to its length."""
    llm = LLM(
        model=s["model"],
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=s["rows"],
        enable_prefix_caching=False,
        gpu_memory_utilization=0.2,  # of the machine's memory, which others use too
    )
    how = SamplingParams(temperature=1.0, top_k=-1, top_p=1.0, max_tokens=s["new"], ignore_eos=True, logprobs=0)
    take_turn()
    while True:
        begun = time.perf_counter()
        found = llm.generate([{"prompt_token_ids": ids} for ids in s["ids"]], how, use_tqdm=False)
        tokens = sum(len(one.outputs[0].token_ids) for one in found)
        take_turn(inside=time.perf_counter() - begun, tokens=tokens)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
