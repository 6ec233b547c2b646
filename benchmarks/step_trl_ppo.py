"""One PPO step after another with TRL 1.12, when told: driven by step.py, run by that TRL's own Python."""

import json
import sys

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer
from turns import take_turn


class Turns(TrainerCallback):
    """Waits between steps."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Called by the trainer."""
        take_turn()

    def on_step_end(self, args, state, control, **kwargs):
        """Called by the trainer."""
        take_turn()


def main(s):
    """Policy, reference, critic and reward model of one size; all settings but the sizes are TRL's own."""
    config = PPOConfig(
        output_dir=s["out"],
        use_cpu=True,
        bf16=s["bf16"],
        gradient_checkpointing=s["checkpointing"],
        per_device_train_batch_size=s["answers"],
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        num_ppo_epochs=s["epochs"],
        total_episodes=1000 * s["answers"],
        response_length=s["max_new_tokens"],
        temperature=1.0,
        learning_rate=1e-6,
        num_sample_generations=0,
        save_strategy="no",
        logging_steps=1000,
        report_to=[],
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(s["model"], padding_side="left")
    torch.manual_seed(0)
    policy, reference = (AutoModelForCausalLM.from_pretrained(s["model"]) for _ in range(2))
    critic, judge = (AutoModelForSequenceClassification.from_pretrained(s["model"], num_labels=1) for _ in range(2))
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in s["rows"]]
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=judge,
        value_model=critic,
        train_dataset=Dataset.from_list(rows),
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=[Turns()],
    )
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
