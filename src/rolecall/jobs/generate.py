"""Answers from a model."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.config.parts import ChatOptions, HeldOutOptions
from rolecall.config.use import GenerateOptions
from rolecall.errors import UserError
from rolecall.files import write_atomically
from rolecall.jobs.arguments import options_of
from rolecall.jobs.data import prompt_rows
from rolecall.jobs.models import open_model
from rolecall.jobs.prompting import Prompting, prompting_of
from rolecall.policy.chat_template import template_kwargs
from rolecall.policy.load import LoadedModel, reading
from rolecall.policy.render import render
from rolecall.policy.token_text import token_texts
from rolecall.recipes.collect import trajectory_of
from rolecall.rollout.engine import check_requests
from rolecall.rollout.native import NativeEngine
from rolecall.rollout.open import open_engine
from rolecall.tasks.streams import head
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
    def group(self) -> int:
        """Which prompt it answers."""
        return self.trajectory.group

    @property
    def sample(self) -> int:
        """Which of the answers to the prompt it is."""
        return self.trajectory.episode

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
class ServedAnswer:
    """One answer of a model behind an address, whose tokens nobody knows."""

    prompt: Prompt
    text: str
    finish: Finish
    group: int
    sample: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """All answers, and what it took."""

    answers: tuple[Answer | ServedAnswer, ...]
    """In the order of the prompts, those to one prompt together."""
    seconds: float
    """Time in the engine, loading not included."""
    engine: str
    """The engine that sampled, or the model and its address."""
    written: int = 0
    """Answers in the file `out`."""


def generate(options: GenerateOptions | None = None, /, **settings: Any) -> list[Answer | ServedAnswer]:
    """Answers to prompts: `generate(model="tiny", prompts=["12+34="], n=4, sampling={"temperature": 0.8})`.

    Takes the options of `rolecall generate`, as one `GenerateOptions` or by name.
    """
    return list(run(options_of(GenerateOptions, settings) if options is None else options).answers)


def run(options: GenerateOptions) -> Generated:
    """Load the model, render the prompts, sample. Whatever is wrong with the call is found before sampling starts."""
    rows = [
        *({"prompt": prompt} for prompt in options.prompts),
        *_read_prompts(options.prompts_file),
        *_rows(options),
    ]
    if options.out is not None and not Path(options.out).expanduser().parent.is_dir():
        raise UserError(f"out {options.out!r}: there is no such folder; make it first")
    if options.behind_api:
        return _behind_api(options, rows)
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
    name = "native" if isinstance(engine, NativeEngine) else "hf"
    written = _write(options, rows, answers, chat=lambda prompt: _chats(loaded, prompt, options, learnt))
    return Generated(answers=answers, seconds=seconds, engine=f"{name} engine, {options.dtype}", written=written)


def _rows(options: GenerateOptions) -> list[dict[str, Any]]:
    """Those of a file, a dataset or a task."""
    if options.rows is None:
        return []
    found = prompt_rows(options.rows, HeldOutOptions(), seed=options.seed).train
    return [dict(row) for row in head(found, options.count)]


def _behind_api(options: GenerateOptions, rows: Sequence[Mapping[str, Any]]) -> Generated:
    """Texts of a model that is asked by OpenAI's API. There are no tokens to show."""
    from rolecall.remote.plain import PlainServer

    server, start = PlainServer(options.model, model=options.served_model), time.perf_counter()
    try:
        asked = [_as_read(row["prompt"], options, chat=bool(options.chat)) for row in rows]
        how: dict[str, Any] = {"n": options.n, "seed": options.seed, "template": options.chat_template_kwargs}
        found = server.answers(asked, options.sampling, lenient=options.out is not None, **how)
    finally:
        server.close()
    answers = tuple(
        ServedAnswer(
            prompt=rows[i]["prompt"],
            text=said.text,
            finish=Finish.LENGTH if said.truncated else Finish.STOP,
            group=i,
            sample=k,
        )
        for i, several in enumerate(found)
        for k, said in enumerate(several)
    )
    written = _write(options, rows, answers, chat=lambda prompt: bool(options.chat))
    seconds, engine = time.perf_counter() - start, f"{server.model} at {server.url}"
    return Generated(answers=answers, seconds=seconds, engine=engine, written=written)


def _as_read(prompt: Prompt, options: GenerateOptions, *, chat: bool) -> Any:
    """The prompt as the model reads it: a text to go on with, or a conversation."""
    if isinstance(prompt, str) and not chat and options.system is None:
        return prompt
    said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if options.system is None or said[0]["role"] == "system":
        return said
    return [{"role": "system", "content": options.system}, *said]


def _write(
    options: GenerateOptions,
    rows: Sequence[Mapping[str, Any]],
    answers: Sequence[Answer | ServedAnswer],
    *,
    chat: Callable[[Prompt], bool],
) -> int:
    """Demonstrations: the prompt as the model read it, and its answer. How many there are."""
    if options.out is None:
        return 0
    whole = [answer for answer in answers if answer.text and not answer.finish.truncated]
    if not whole:
        raise UserError(
            f"none of {len(answers)} answers is whole, so nothing was written: raise sampling.max_new_tokens",
            exit_code=1,
        )
    lines = []
    for answer in whole:
        prompt = _as_read(answer.prompt, options, chat=chat(answer.prompt))
        said = answer.text if isinstance(prompt, str) else [{"role": "assistant", "content": answer.text}]
        lines.append(json.dumps({**rows[answer.group], "prompt": prompt, "completion": said}) + "\n")
    write_atomically(Path(options.out).expanduser(), "".join(lines).encode())
    return len(whole)


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
    messages, chat = isinstance(prompt, list | tuple), _chats(loaded, prompt, options, learnt)
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


def _chats(loaded: LoadedModel, prompt: Prompt, options: GenerateOptions, learnt: Prompting) -> bool:
    """Whether a prompt goes into the chat template."""
    plain = learnt.style == "text" and isinstance(prompt, str) and options.system is None
    return loaded.has_chat_template and not plain if options.chat is None else options.chat


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
