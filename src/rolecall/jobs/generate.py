"""Answers from a model."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.config.parts import ChatOptions
from rolecall.config.use import GenerateOptions
from rolecall.errors import UserError
from rolecall.jobs.arguments import options_of
from rolecall.jobs.models import open_model
from rolecall.jobs.prompting import Prompting, prompting_of
from rolecall.policy.load import LoadedModel, reading
from rolecall.policy.render import render
from rolecall.policy.row_template import template_kwargs
from rolecall.policy.token_text import token_texts
from rolecall.recipes.sampling import trajectory_of
from rolecall.rollout.engine import check_requests
from rolecall.rollout.native import NativeEngine
from rolecall.rollout.open import open_engine
from rolecall.types import Completion, Finish, Request, Trajectory

Prompt = str | Sequence[Mapping[str, Any]]
"""A text, or messages with "role" and "content"."""

_QUIET = {"verbose": False}
"""A prompt that is too long is an error here, so the tokenizer need not warn of it too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer to one prompt."""

    prompt: Prompt
    """What was asked."""
    text: str
    """The answer, without the token that ended it."""
    trajectory: Trajectory
    """Every token with its role and log-prob, those of the prompt first; its `group` is the prompt's number."""
    tokens: tuple[str, ...]
    """The text of each token."""

    def __repr__(self) -> str:
        prompt = self.prompt if isinstance(self.prompt, str) else self.prompt[-1].get("content", "")
        return f"Answer({_short(prompt)} -> {_short(self.text)}, {self.finish})"

    @property
    def finish(self) -> Finish:
        """Why it ended."""
        return self.trajectory.finish

    @property
    def start(self) -> int:
        """The index of the first token of the answer."""
        return self.trajectory.turns[0][0]

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens of the answer, the stop token included."""
        return self.trajectory.ids[self.start :]

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The log-prob of each token of the answer."""
        return (self.trajectory.behaviour_logprobs or ())[self.start :]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """All answers, and what it took."""

    answers: tuple[Answer, ...]
    """In the order of the prompts, those to one prompt together."""
    seconds: float
    """Time in the engine, loading not included."""
    engine: str
    """The engine that sampled."""


def generate(options: GenerateOptions | None = None, /, **settings: Any) -> list[Answer]:
    """Answers to prompts: `generate(model="tiny", prompts=["12+34="], n=4, sampling={"temperature": 0.8})`.

    Takes the options of `rolecall generate`, as one `GenerateOptions` or by name.
    """
    return list(run(options_of(GenerateOptions, settings) if options is None else options).answers)


def run(options: GenerateOptions) -> Generated:
    """Load the model, render the prompts, sample. Whatever is wrong with the call is found before sampling starts."""
    rows = [*({"prompt": prompt} for prompt in options.prompts), *_read_prompts(options.prompts_file)]
    loaded = open_model(options.model, dtype=options.dtype, **reading(options.policy))
    learnt = prompting_of(options.model)
    try:
        requests = [
            Request(
                prompt_ids=prompt_ids(loaded, row["prompt"], options, learnt, row=row),
                sampling=options.sampling,
                n=options.n,
                seed=options.seed,
                prompt=i,
            )
            for i, row in enumerate(rows)
        ]
        vocabulary = loaded.model.get_output_embeddings().weight.shape[0]
        check_requests(requests, context_length=loaded.context_length, vocabulary=vocabulary)
        engine = open_engine(loaded, name=options.engine)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error
    start = time.perf_counter()
    completions = engine.generate(requests)
    seconds = time.perf_counter() - start
    answers = tuple(_answer(loaded, rows[c.prompt]["prompt"], requests[c.prompt], c) for c in completions)
    return Generated(answers=answers, seconds=seconds, engine="native" if isinstance(engine, NativeEngine) else "hf")


def prompt_ids(
    loaded: LoadedModel,
    prompt: Prompt,
    options: GenerateOptions,
    learnt: Prompting | None = None,
    *,
    row: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """The prompt as tokens, with the tools of its row, in the model's chat template if it is to be; if nothing is said of
    that, as in its run."""
    learnt = learnt or Prompting()
    messages = isinstance(prompt, list | tuple)
    plain = learnt.style == "text" and not messages and options.system is None
    chat = loaded.has_chat_template and not plain if options.chat is None else options.chat
    wish = "a list of messages" if messages else "a system message" if options.system is not None else "--chat"
    if (messages or options.system is not None or chat) and not loaded.has_chat_template:
        raise UserError(f"model {loaded.name!r} has no chat template, which {wish} needs; give prompts as plain text")
    if messages and options.chat is False:
        raise UserError("a list of messages needs the chat template; leave out --no-chat")
    try:
        json.dumps([prompt, options.system], ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:  # a stray byte on the command line, half a pair in a JSON escape
        raise UserError("a prompt holds a character that is not valid Unicode; check how it is encoded") from error
    filled = learnt.filled(ChatOptions(system_prompt=options.system, chat_template_kwargs=options.chat_template_kwargs))
    try:
        kwargs = template_kwargs(row or {}, filled.chat_template_kwargs, plain=not chat)
    except ValueError as error:
        raise UserError(f"the row of prompt {_quoted(prompt)}: {error}") from error
    if not chat:
        return tuple(loaded.tokenizer(prompt, **_QUIET)["input_ids"])
    return _chat_ids(loaded, prompt, filled.system_prompt, kwargs)


def _quoted(prompt: Prompt) -> str:
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content"))
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def _chat_ids(loaded: LoadedModel, prompt: Prompt, system: str | None, kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    try:
        return render(
            loaded.tokenizer,
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
            system_prompt=system,
            chat_template_kwargs=kwargs or None,
            add_generation_prompt=True,
            stop_ids=loaded.stop_ids,
        ).ids
    except Exception as error:  # a template is a program of the model's and raises what it likes
        raise UserError(f"the model's chat template refuses the prompt: {' '.join(str(error).split())}") from error


def _answer(loaded: LoadedModel, prompt: Prompt, request: Request, completion: Completion) -> Answer:
    trajectory = trajectory_of(request, completion, group=completion.prompt)
    content = completion.ids[:-1] if completion.finish is Finish.STOP else completion.ids
    return Answer(
        prompt=prompt,
        text=loaded.tokenizer.decode(content, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        trajectory=trajectory,
        tokens=tuple(token_texts(loaded.tokenizer, trajectory.ids)),
    )


def _short(text: Any) -> str:
    shown = repr(text)
    return shown if len(shown) <= 60 else f"{shown[:40]}…{shown[-19:]}"


def _read_prompts(file: str | None) -> list[dict[str, Any]]:
    """Rows with a `prompt`: the lines of a .txt file, or the rows of a .jsonl file, which may name it `messages`."""
    if file is None:
        return []
    path = Path(file).expanduser()
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(f"prompts file {file!r}: the name must end in .txt or .jsonl")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"prompts file {file!r} is not text in UTF-8") from error
    except OSError as error:
        raise UserError(f"prompts file {file!r} cannot be read: {error.strerror}") from error
    except ValueError as error:  # a NUL in the name
        raise UserError(f"prompts file {file!r} cannot be read: {error}") from error
    numbered = [(i, line.rstrip("\r")) for i, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"prompts file {file!r} holds no prompts")
    if path.suffix == ".txt":
        return [{"prompt": line} for _, line in numbered]
    return [_row(line, where=f"prompts file {file!r}, line {i}") for i, line in numbered]


def _row(line: str, *, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not a JSON object") from error
    prompt = row.get("prompt", row.get("messages")) if isinstance(row, dict) else None
    if isinstance(prompt, str) and prompt:
        return {**row, "prompt": prompt}
    if isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt):
        return {**row, "prompt": prompt}
    raise UserError(f"{where} needs `prompt`, a text that is not empty, or `messages`, each with a role")
