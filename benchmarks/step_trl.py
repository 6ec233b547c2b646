"""One GRPO step after another with TRL, when told: driven by step.py, run by TRL's own Python. Imports nothing of ours."""

import json
import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from turns import take_turn


def count_e(completions, **columns):
    """The same reward."""
    return [(text.count("e") + text.count("3")) / 10 for text in completions]


class Turns(TrainerCallback):
    """Waits between steps."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Called by the trainer."""
        take_turn()

    def on_step_end(self, args, state, control, **kwargs):
        """Called by the trainer."""
        take_turn()


class EndAt(LogitsProcessor):
    """Ends answers after so many tokens, whatever they say."""

    def __init__(self, prompt, lengths, stop):
        self.prompt, self.lengths, self.stop = prompt, lengths, stop

    def __call__(self, ids, scores):
        """Called by generate."""
        over = ids.shape[1] - self.prompt + 1 >= self.lengths
        scores[over] = -torch.inf
        scores[over, self.stop] = 0
        return scores


def end_at(model, shortest, longest, samples, stop):
    """The lengths that the other side uses."""
    plain = model.generate

    def generate(*args, input_ids, **kwargs):
        row = torch.arange(len(input_ids))
        lengths = shortest + (7 * (row // samples) + 5 * (row % samples)) % (longest - shortest + 1)
        return plain(
            *args,
            input_ids=input_ids,
            logits_processor=LogitsProcessorList([EndAt(input_ids.shape[1], lengths, stop)]),
            **kwargs,
        )

    model.generate = generate


def main(s):
    """Train as the settings say."""
    answers = s["prompts"] * s["samples"]
    config = GRPOConfig(
        output_dir=s["out"],
        use_cpu=True,
        bf16=s["bf16"],
        gradient_checkpointing=s["checkpointing"],
        max_steps=1000,
        per_device_train_batch_size=s["batch"],
        gradient_accumulation_steps=answers // s["batch"],
        num_generations=s["samples"],
        max_completion_length=s["max_new_tokens"],
        temperature=1.0,
        top_k=0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="grpo",
        num_iterations=1,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(s["model"])
    model = AutoModelForCausalLM.from_pretrained(s["model"])
    if s.get("lengths"):
        end_at(model, *s["lengths"], s["samples"], tokenizer.eos_token_id)
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=count_e,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in s["rows"]]),
        callbacks=[Turns()],
    )
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
