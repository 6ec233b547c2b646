"""Models on disk for audits: one that has learned a little, and copies of it with something wrong."""

import json
import shutil
from pathlib import Path
from typing import Any

import rolecall
from rolecall.policy.load import load, save, save_model
from rolecall.policy.tiny import tiny_tokenizer
from rolecall.tasks import demonstrations, resolve
from rolecall.train.progress import Quiet

RG = "rg:chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1"

# As SmolLM2-Instruct has it: a system message unless there is one, and the end of turn is end of text and pad too.
SMOL_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def smol_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = SMOL_TEMPLATE
    tokenizer.pad_token = "<|im_end|>"
    tokenizer.bos_token = "<|im_start|>"
    return tokenizer


def train_chat_model(directory: Path) -> Path:
    """A chat model that adds two digits, rightly now and then, in plain text and in conversations."""
    fresh = load("tiny")
    fresh.model.config.pad_token_id = fresh.model.generation_config.pad_token_id = 258
    save_model(fresh.model, directory / "fresh")
    smol_tokenizer().save_pretrained(directory / "fresh")
    sums = list(demonstrations(resolve("addition:digits=1"), "train", n=80))
    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}], "completion": row["completion"]} for row in sums]
    words = list(demonstrations(resolve(RG), "train", n=80))
    rows = [{"prompt": row["prompt"], "completion": row["completion"]} for row in [*sums, *chats, *words]]
    run = rolecall.sft(
        model=str(directory / "fresh"),
        rows=rows,
        steps=60,
        batch=24,
        optim={"lr": 3e-3},
        save={"every": 0},
        out=str(directory / "run"),
        progress=Quiet(),
    )
    return run.model


def with_tokenizer(model: Path, directory: Path, tokenizer: Any) -> str:
    """The same weights with another tokenizer."""
    shutil.copytree(model, directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        (directory / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(directory)
    return str(directory)


def with_generation_config(model: str, directory: Path, **settings: Any) -> str:
    """The same model with other settings in generation_config.json."""
    shutil.copytree(model, directory)
    path = directory / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return str(directory)


def with_weights(model: str, directory: Path, change: Any) -> str:
    """The same model with weights that `change(model)` changes in place."""
    loaded = load(model)
    change(loaded.model)
    save(loaded, directory)
    return str(directory)


def sums(n: int = 40) -> list[dict[str, str]]:
    """Rows of the user's own."""
    return [
        {"prompt": row["prompt"], "answer": row["answer"]} for row in resolve("addition:digits=1").rows("train", n=n)
    ]


def chat_sums(n: int = 40) -> list[dict[str, Any]]:
    return [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in sums(n)]


def verl_sums(n: int = 40) -> list[dict[str, Any]]:
    return [
        {
            "data_source": "sums",
            "prompt": row["prompt"],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"split": "train", "index": i},
        }
        for i, row in enumerate(chat_sums(n))
    ]
