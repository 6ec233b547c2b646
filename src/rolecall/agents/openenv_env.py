"""Environments behind an OpenEnv server: `openenv:http://127.0.0.1:8000`. Needs agent.network.

Every episode has a session of its own on the server, which is closed when the episode ends. The server's schema says what an
action is: of one field that is a text, the policy's message is the action; else it is written as JSON.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import httpx

from rolecall.agents.gym_text import after_prompt
from rolecall.tasks.env import EnvError, Message, Said, Step

_DAY_S = 86400.0
"""The client's own limit for an answer; agent.deadline is the one that counts."""


class OpenEnv:
    """Observations are text as they are, or their fields by name. An answer that is no action is told what is wanted, counted
    (`bad_actions`), and is no step. What the row holds beside its prompt goes to the server's `reset`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._fields = _action_fields(url)
        self._client: Any = None

    def reset(self, row: Mapping[str, Any], seed: int) -> Said:
        from openenv.core import GenericEnvClient

        self._client = GenericEnvClient(base_url=self._url, message_timeout_s=_DAY_S).sync()
        given = {name: value for name, value in row.items() if name not in ("prompt", "seed")}
        found = self._client.reset(**given, seed=seed % 2**31)
        if found.done:
            raise EnvError(f"the environment at {self._url} is over before the first action")
        first, asked = _text(found.observation), row.get("prompt")
        return f"{first}\n\n{self._wanted()}".strip() if asked is None else after_prompt(asked, first)

    def step(self, message: Message) -> Step:
        bad = Step(messages=self._wanted(), counts={"bad_actions": 1.0})
        try:
            found = self._client.step(self._action(message["content"]))
        except ValueError:
            return bad
        except RuntimeError as error:  # how the client says that the server refused something
            if "VALIDATION_ERROR" in str(error):
                return bad
            raise
        if found.done:
            self.final_reward()
        reward = None if found.reward is None else float(found.reward)
        return Step(messages=_text(found.observation), reward=reward, done=bool(found.done))

    def final_reward(self) -> None:
        """Nothing to add; the episode is over, and so is its session."""
        self._client.close()

    def _action(self, said: str) -> dict[str, Any]:
        if len(self._fields) != 1:
            found = json.loads(said[said.find("{") : said.rfind("}") + 1])
            if not isinstance(found, dict):
                raise ValueError("not an object")
            return found
        ((name, field),) = self._fields.items()
        return {name: said if field.get("type") == "string" else json.loads(said)}

    def _wanted(self) -> str:
        named = {n: f.get("description") or f.get("title") or f.get("type", "") for n, f in self._fields.items()}
        if len(named) != 1:
            about = ", ".join(f'"{name}": {meaning}' for name, meaning in named.items())
            return f"Answer with a JSON object, and nothing else: {{{about}}}"
        ((name, field),) = self._fields.items()
        kind = "" if field.get("type") == "string" else f" ({field.get('type', 'JSON')})"
        return f"Answer with {name}{kind}: {named[name]}"


def check_openenv(url: str) -> None:
    """Refuse what is no address, or say that the package is missing, without calling anybody."""
    if not url.startswith(("http://", "https://")):
        raise EnvError(f"environment 'openenv:{url}' needs the address of a server: openenv:http://HOST:PORT")
    try:
        import openenv.core  # noqa: F401
    except ImportError as error:
        raise EnvError(
            "environments named openenv:… need the package openenv-core: pip install 'rolecall[openenv]'"
        ) from error


@cache
def _action_fields(url: str) -> dict[str, dict[str, Any]]:
    """What an action of the server's is made of."""
    check_openenv(url)
    try:
        answer = httpx.get(f"{url.rstrip('/')}/schema", timeout=30.0, trust_env=False)
        fields = answer.raise_for_status().json()["action"]["properties"]
    except (httpx.HTTPError, OSError) as error:
        raise EnvError(f"the OpenEnv server at {url} cannot be reached: {error}; is it running?") from error
    except (ValueError, KeyError, TypeError) as error:
        raise EnvError(f"{url} does not answer as an OpenEnv server does: it has no schema of its actions") from error
    return {name: dict(field) for name, field in fields.items() if name != "metadata"}


def _text(observation: Mapping[str, Any]) -> str:
    shown = {n: x for n, x in observation.items() if n not in ("done", "reward", "metadata")}
    plain = {n: x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for n, x in shown.items()}
    return next(iter(plain.values())) if len(plain) == 1 else "\n".join(f"{n}: {x}" for n, x in plain.items())
