"""Networks that give a number: critics (one per position) and reward models (one per sequence).

Both are a trunk, which is a language model without its vocabulary head, and a `ScalarHead`. On disk they are what
transformers calls a sequence classifier with one label, so reward models made elsewhere load here and ours load there.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rolecall.policy.chat_template import Message
from rolecall.policy.load import (
    Dtype,
    LoadedModel,
    LoadError,
    check_directory,
    check_finite,
    make_trainable,
)
from rolecall.policy.pretrained import Attention, load_errors, read_pretrained
from rolecall.policy.reading import Trunk
from rolecall.policy.render import render
from rolecall.policy.weight_files import write_files
from rolecall.transfer import to_device

_HEAD_KEY = "score.weight"


class ScalarHead(nn.Module):
    """A linear map from the hidden state to one number, in float32 whatever the trunk's dtype."""

    def __init__(self, hidden_size: int, *, std: float = 0.0, seed: int = 0) -> None:
        """Weights are drawn from N(0, std²); by default they are 0, so that a fresh critic predicts 0."""
        super().__init__()
        drawn = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(std * drawn)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] to [...]."""
        return hidden.to(self.weight.dtype) @ self.weight[0]

    def values(self, hidden: Tensor) -> Tensor:
        """[batch, time, hidden] to [batch, time]: values[t] is V before token t, read from the hidden state at t - 1.

        Nothing stands before the first token, so its value is NaN.
        """
        read = self(hidden[:, :-1])
        return torch.cat([read.new_full((len(read), 1), float("nan")), read], dim=1)


class ScalarModel(nn.Module):
    """A trunk with a scalar head. Rows are padded on the right; attention is causal, so padding is never seen."""

    def __init__(self, *, trunk: PreTrainedModel, head: ScalarHead, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head
        self.tokenizer = tokenizer
        self._reader: Trunk | None = None  # made when the model is on its device

    @classmethod
    def from_policy(cls, policy: LoadedModel, *, std: float = 0.0, seed: int = 0) -> Self:
        """A copy of the policy's trunk with a fresh head."""
        if hasattr(policy.model, "peft_config"):
            raise ValueError("the policy carries an adapter: build this from `lora.merged(policy)` or before adding it")
        trunk = copy.deepcopy(policy.model.base_model)
        head = ScalarHead(trunk.get_input_embeddings().embedding_dim, std=std, seed=seed)
        return cls(trunk=trunk, head=head.to(trunk.device), tokenizer=policy.tokenizer)

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        dtype: Dtype = "float32",
        gradient_checkpointing: bool = False,
        attention: Attention = "auto",
        trust_remote_code: bool = False,
    ) -> Self:
        """Read a directory written by `save`, or any sequence classifier with one label."""
        directory = Path(name).expanduser()
        if not directory.is_dir():
            raise LoadError(f"model {str(name)!r}: no such directory; give the directory of a reward model or critic")
        check_directory(directory)
        head = _read_head(directory)
        with load_errors(str(directory), lambda why: f"model {str(directory)!r} cannot be read: {why}"):
            trunk = read_pretrained(
                AutoModel,
                str(directory),
                dtype=dtype,
                attention=attention,
                trust_remote_code=trust_remote_code,
                other_tensors=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
        make_trainable(trunk, gradient_checkpointing=gradient_checkpointing)
        model = cls(trunk=trunk, head=head, tokenizer=tokenizer)
        check_finite(model, where=str(directory))
        return model

    def save(self, directory: str | Path | None) -> None:
        """Write config, trunk and head in safetensors, and the tokenizer with its template.

        Of a model that lies in parts all ranks must ask; those without a directory only help to gather.
        """
        place = None if directory is None else Path(directory)
        if place is not None:
            place.mkdir(parents=True, exist_ok=True)
            config = copy.deepcopy(self.trunk.config)
            config.architectures = [type(self.trunk).__name__.removesuffix("Model") + "ForSequenceClassification"]
            config.num_labels = 1
            config.use_cache = True
            config.dtype = self.trunk.dtype
            config.save_pretrained(place)
            self.tokenizer.save_pretrained(place)
        prefix, held = self.trunk.base_model_prefix, self.state_dict()
        named = {key.replace("trunk", prefix, 1): tensor for key, tensor in held.items() if key.startswith("trunk.")}
        write_files({**named, _HEAD_KEY: held["head.weight"]}, place)

    def hidden(self, ids: Tensor) -> Tensor:
        """[batch, time, hidden]: the trunk's last hidden states."""
        return self.trunk(input_ids=to_device(ids, self.trunk.device), use_cache=False).last_hidden_state

    def settle(self, *, flat: bool) -> None:
        """As `PolicyModel.settle`."""
        self._trunk().settle(flat=flat)

    def _trunk(self) -> Trunk:
        if self._reader is None:
            self._reader = Trunk(self.trunk)
        return self._reader

    def at(self, ids: Tensor, needed: Tensor) -> Tensor:
        """[n] the numbers read at the needed positions [batch, time], row by row."""
        return self.head(self._trunk()(ids, needed))


class Critic(ScalarModel):
    """V before every token."""

    @classmethod
    def from_reward_model(cls, reward_model: "RewardModel") -> Self:
        """A critic that starts as a copy of the reward model, head included."""
        return cls(
            trunk=copy.deepcopy(reward_model.trunk),
            head=copy.deepcopy(reward_model.head),
            tokenizer=reward_model.tokenizer,
        )

    def forward(self, ids: Tensor, asked: Tensor | None = None) -> Tensor:
        """[batch, time] ids to [batch, time] values, NaN at the first position.

        With `asked` [batch, time - 1], one entry per token but the first: [n] the values of the asked tokens only.
        """
        if asked is not None:
            return self.at(ids, nn.functional.pad(asked, (0, 1)))
        return self.head.values(self.hidden(ids))


class RewardModel(ScalarModel):
    """One score per sequence, with the tokenizer and template it was trained with."""

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """[batch, time] ids and [batch] lengths to [batch] scores, read at the last token of each row."""
        return self.scores(ids, lengths)

    def scores(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """[batch] scores, read at position lengths - 1; what comes after it has no influence."""
        lengths = lengths.cpu()  # a wrapper may have moved them
        if lengths.shape != ids.shape[:1]:
            raise ValueError(f"lengths has shape {tuple(lengths.shape)} but there are {len(ids)} rows of ids")
        if len(ids) and not (int(lengths.min()) >= 1 and int(lengths.max()) <= ids.shape[1]):
            raise ValueError(f"lengths must lie in 1..{ids.shape[1]}: there is no last token to read a score from")
        last = torch.arange(ids.shape[1]) == lengths[:, None] - 1
        return self.at(ids, last)

    @property
    def context_length(self) -> int:
        """Positions the trunk can attend to."""
        declared = getattr(self.trunk.config.get_text_config(), "max_position_embeddings", None)
        return int(declared or self.tokenizer.model_max_length)

    def encode(
        self,
        conversation: str | Sequence[Message],
        *,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Ids of a finished conversation, in this model's own template; or of a plain text."""
        return render(
            self.tokenizer,
            conversation,
            system_prompt=system_prompt,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=False,
        ).ids


def _read_head(directory: Path) -> ScalarHead:
    for shard in sorted(directory.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            if _HEAD_KEY in file.keys():  # noqa: SIM118  (the file is not a mapping)
                weight = file.get_tensor(_HEAD_KEY).float().clone()
                break
    else:
        raise LoadError(f"model {str(directory)!r} has no {_HEAD_KEY!r}: it is not a reward model or critic")
    if weight.shape[0] != 1:
        raise LoadError(f"model {str(directory)!r} gives {weight.shape[0]} numbers; a reward model gives one")
    head = ScalarHead(weight.shape[1])
    head.weight.data = weight
    return head
