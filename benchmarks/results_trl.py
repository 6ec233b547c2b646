"""GRPO with TRL, run by its own environment's Python: `python results_trl.py '{"model": …}'`. Imports nothing of ours."""

import json
import sys
import time
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def right(completions, answer, **kwargs):
    """1 for the right answer, else 0."""
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]


class Rewards(TrainerCallback):
    """Keeps the mean reward of every step, and its seconds without saving."""

    def __init__(self):
        self.found, self.seconds, self.begun = [], [], 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        """Called by the trainer."""
        self.begun = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        """Called by the trainer, before it saves."""
        self.seconds.append(time.monotonic() - self.begun)
        self.begun = time.monotonic()

    def on_save(self, args, state, control, **kwargs):
        """Called by the trainer when it has saved."""
        self.begun = time.monotonic()

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Called by the trainer."""
        if logs and "reward" in logs:
            self.found.append(logs["reward"])


def main(s):
    """Train as the settings say; everything that they do not name is TRL's default, or its counterpart of ours."""
    rows = [json.loads(line) for line in Path(s["rows"]).read_text().splitlines()]
    config = GRPOConfig(
        output_dir=s["out"],
        seed=s["seed"],
        use_cpu=True,
        bf16=s["bf16"],
        gradient_checkpointing=False,
        max_steps=s["steps"],
        per_device_train_batch_size=s["answers"],
        num_generations=s["samples"],
        max_completion_length=s["max_new_tokens"],
        temperature=1.0,
        learning_rate=s["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="grpo",
        scale_rewards="group",
        num_iterations=1,
        logging_steps=1,
        save_steps=s["every"],
        save_only_model=True,
        report_to=[],
        disable_tqdm=True,
    )
    rewards = Rewards()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(s["model"]),
        processing_class=AutoTokenizer.from_pretrained(s["model"]),
        reward_funcs=right,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[rewards],
    )
    trainer.remove_callback(PrinterCallback)
    begun = time.monotonic()
    trainer.train()
    log = {"train_seconds": time.monotonic() - begun, "rewards": rewards.found, "step_seconds": rewards.seconds}
    Path(s["out"], "log.json").write_text(json.dumps(log))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
