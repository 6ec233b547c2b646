"""A model behind OpenAI's API, wherever it runs: text in, text out. Good enough to evaluate, to judge, to teach and to play against;
none of its tokens can be trained."""

import asyncio
import hashlib
import logging
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rolecall.config.use import server_key
from rolecall.errors import UserError
from rolecall.remote.connection import Background, Connection
from rolecall.remote.dialect import ServerLostError, ServerRefusedError
from rolecall.types import Sampling

_log = logging.getLogger("rolecall")

_AT_ONCE = 64
"""Requests that a server is given at a time."""
_TRIES = 5
_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TextAnswer:
    """What a server wrote."""

    text: str
    tokens: float
    """By its own count, shared out evenly over the answers to a prompt."""
    truncated: bool


class PlainServer:
    """Prompts of plain text are completed, conversations answered."""

    def __init__(self, url: str, *, model: str | None = None) -> None:
        """`model` may be left out where the server has but one. The key is in the environment. A `UserError` if there is no such
        server or model."""
        self.url, self._background, self._room = url.rstrip("/"), Background(), asyncio.Semaphore(_AT_ONCE)
        key = server_key("OPENAI_API_KEY")
        self._call = Connection(self.url, key=key, deadline=_SECONDS, proxies=True)
        self._background.connections.append(self._call)
        try:
            self.model = self._background.run(self._chosen(model))
        except BaseException:
            self.close()
            raise

    async def _chosen(self, model: str | None) -> str:
        said = await self._asked("GET", "/models", None)
        found = [str(one["id"]) for one in said["data"]]
        if model is None and len(found) != 1:
            raise UserError(f"{self.url} has {len(found)} models: choose one with served_model, of {', '.join(found)}")
        if model is not None and model not in found:
            raise UserError(f"{self.url} has no model {model!r}, but {', '.join(found) or 'none'}")
        return model or found[0]

    def answers(
        self,
        prompts: Sequence[Any],
        sampling: Sampling,
        *,
        n: int,
        seed: int,
        template: Mapping[str, Any],
        lenient: bool = False,
    ) -> list[list[TextAnswer]]:
        """n answers to each prompt, a text or messages; `template` is what a chat template is told. `lenient`: none where the server
        failed, which is a warning, unless it failed every time."""
        asked = [self.ask(p, sampling, n=n, seed=_seed(seed, i), template=template) for i, p in enumerate(prompts)]
        return self._background.run(_all(asked, lenient=lenient))

    def begin(self, prompt: Any, sampling: Sampling, *, seed: int, seconds: float) -> "Future[TextAnswer]":
        """Ask for one answer, and do not wait for it: at most so many seconds from when the server is asked."""

        async def one() -> TextAnswer:
            (answer,) = await self.ask(prompt, sampling, n=1, seed=seed, seconds=seconds)
            return answer

        return asyncio.run_coroutine_threadsafe(one(), self._background.loop)

    async def ask(
        self,
        prompt: Any,
        sampling: Sampling,
        *,
        n: int,
        seed: int,
        template: Mapping[str, Any] | None = None,
        seconds: float | None = None,
    ) -> list[TextAnswer]:
        """n answers to a prompt, when the server has room. A `UserError` says why there are none."""
        async with self._room:
            try:
                async with asyncio.timeout(seconds):
                    return await self._answer(prompt, _body(sampling, n, seed), template or {})
            except TimeoutError as error:
                raise UserError(f"{self.url}: no answer within {seconds:g} s") from error
            except (KeyError, TypeError, IndexError, AttributeError) as error:
                why = f"its answer cannot be read ({type(error).__name__}: {error})"
                raise UserError(f"{self.url}: {why}", exit_code=1) from error

    async def _answer(self, prompt: Any, body: dict[str, Any], template: Mapping[str, Any]) -> list[TextAnswer]:
        chat = not isinstance(prompt, str)
        asked = (
            {"messages": prompt} | ({"chat_template_kwargs": template} if template else {})
            if chat
            else {"prompt": prompt}
        )
        path = "/chat/completions" if chat else "/completions"
        said = await self._asked("POST", path, {"model": self.model, **asked, **body})
        choices = sorted(said["choices"], key=lambda choice: choice["index"])
        if len(choices) != body["n"]:
            raise UserError(f"{self.url} gave {len(choices)} answers to a prompt instead of {body['n']}", exit_code=1)
        tokens = (said.get("usage") or {}).get("completion_tokens") or 0
        return [
            TextAnswer(
                text=(choice["message"]["content"] or "") if chat else choice["text"],
                tokens=tokens / len(choices),
                truncated=choice["finish_reason"] == "length",
            )
            for choice in choices
        ]

    async def _asked(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        """With pauses in between while the server cannot be reached, fails or has too much to do."""
        for number in range(_TRIES):
            try:
                return await self._call(method, path, body)
            except ServerLostError as error:
                if number == _TRIES - 1 or body is None:
                    raise UserError(
                        f"{self.url}: {error}; give the address of an API, such as http://host:8000/v1"
                    ) from error
                await asyncio.sleep(0.2 * 2**number)
            except ServerRefusedError as error:
                raise UserError(f"{self.url}{path}: {_meaning(error)}") from error
        raise AssertionError("unreachable")

    def close(self) -> None:
        self._background.close()


async def _all(asked: Sequence[Coroutine[Any, Any, list[TextAnswer]]], *, lenient: bool) -> list[list[TextAnswer]]:
    if not lenient:
        return list(await asyncio.gather(*asked))
    found = await asyncio.gather(*asked, return_exceptions=True)
    failed = [error for error in found if isinstance(error, BaseException)]
    if failed and (len(failed) == len(found) or not isinstance(failed[0], UserError)):
        raise failed[0]
    if failed:
        _log.warning("%d of %d prompts have no answer: %s", len(failed), len(found), failed[0])
    return [[] if isinstance(answers, BaseException) else answers for answers in found]


def _meaning(error: ServerRefusedError) -> str:
    if error.status in (401, 403):
        return f"{error}; give the key in the environment variable ROLECALL_SERVER_KEY or OPENAI_API_KEY"
    if error.status == 404:
        return f"it answers 404 ({error}): give the address of an API, such as http://host:8000/v1; conversations need a chat model"
    return f"it answers {error.status}: {error}"


def _body(sampling: Sampling, n: int, seed: int) -> dict[str, Any]:
    given = {
        "n": n,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "seed": seed,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop_strings) or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _seed(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "big") >> 1
