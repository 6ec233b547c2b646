"""The options of `rolecall generate`."""

from dataclasses import dataclass, field
from typing import Any, Literal

from rolecall.config.parts import LoadOptions
from rolecall.config.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Answers from a model, whole or token by token."""

    model: str
    """`tiny`, a model directory, a .gguf file, a Hugging Face hub id, or a run's directory."""
    prompts: tuple[str | list[dict[str, Any]], ...] = field(default=(), metadata={"flag": "prompt"})
    """What to answer; repeat the flag for several. In a file or from Python a prompt may be a list of messages."""
    prompts_file: str | None = None
    """More prompts: a .txt file with one in each line, or a .jsonl file whose rows have `prompt` or `messages`,
    and `tools` if they bring any."""
    n: int = field(default=1, metadata={"known_as": ("num_generations", "num_return_sequences", "num_samples")})
    """Answers to each prompt."""
    seed: int = 0
    """The same seed draws the same answers."""
    chat: bool | None = None
    """Put prompts into the model's chat template. Left out: if the run in `model` was trained on messages; of a model that
    no run made, if it has a template."""
    system: str | None = field(default=None, metadata={"known_as": ("system_prompt",)})
    """A system message before each prompt. Left out: that of the run in `model`."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """What else to tell the chat template, such as `enable_thinking`."""
    engine: Literal["auto", "native", "hf"] = "auto"
    """What samples. native: quick, for Llama-family models. hf: any architecture. auto: native where it can."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The numbers to compute in."""
    show: Literal["text", "tokens"] = "text"
    """text: the answers. tokens: every token with its role and log-prob."""
    json: bool = False
    """Print one JSON object for each answer, with ids and log-probs."""
    sampling: Sampling = field(default_factory=Sampling)
    """How to draw tokens."""
    policy: LoadOptions = field(default_factory=LoadOptions)

    def __post_init__(self) -> None:
        if not self.prompts and self.prompts_file is None:
            raise ValueError("there is nothing to answer: give --prompt TEXT or --prompts_file FILE")
        if self.n < 1:
            raise ValueError(f"n must be at least 1 answer, got {self.n}")
        for i, prompt in enumerate(self.prompts):
            if not prompt:
                raise ValueError(f"prompt {i} is empty: write something to go on from")
        if self.chat is False and self.system is not None:
            raise ValueError("a system message needs the chat template: leave out --no-chat, or put it into the prompt")
