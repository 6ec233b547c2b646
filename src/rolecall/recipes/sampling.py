"""From a row to a request, and from a completion back to text and a trajectory."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from rolecall.config.parts import ChatOptions
from rolecall.maths.roles import Role, response_roles
from rolecall.policy.load import LoadedModel
from rolecall.recipes.rendering import rendered_prompt
from rolecall.rollout.engine import Engine, in_order
from rolecall.train.timing import Timer
from rolecall.types import Completion, Finish, Request, Sampling, Trajectory


def prompt_request(
    policy: LoadedModel,
    row: Mapping[str, Any],
    chat: ChatOptions,
    sampling: Sampling,
    *,
    n: int,
    seed: int,
    step: int,
    prompt: int,
) -> Request:
    """The request for a row's prompt."""
    ids = rendered_prompt(row, policy=policy, chat=chat).ids
    return Request(prompt_ids=ids, sampling=sampling, n=n, seed=seed, step=step, prompt=prompt)


def answered(engine: Engine, requests: Sequence[Request], timer: Timer) -> list[Completion]:
    """All answers in order; the timer's watcher is told of each as it ends."""
    asked = sum(request.n for request in requests)
    return in_order(requests, timer.counted(engine.stream(requests), total=asked, unit="answers"))


def answer_text(policy: LoadedModel, completion: Completion) -> str:
    """The answer as text, without its stop token."""
    ids = completion.ids[:-1] if completion.finish is Finish.STOP else completion.ids
    return str(policy.tokenizer.decode(list(ids), skip_special_tokens=True))


def as_completion(prompt: Any, answer: str) -> Any:
    """Text for text prompts, a message for conversations: what reward functions of TRL's kind expect."""
    return answer if isinstance(prompt, str) else [{"role": "assistant", "content": answer}]


def trajectory_of(request: Request, completion: Completion, *, group: int) -> Trajectory:
    """The whole sequence with its roles: the prompt was given, the answer's roles come from its length and finish."""
    start, length = len(request.prompt_ids), len(completion.ids)
    return Trajectory(
        ids=request.prompt_ids + completion.ids,
        roles=(int(Role.PROMPT),) * start + _answer_roles(length, completion.finish is Finish.STOP),
        behaviour_logprobs=(float("nan"),) * start + completion.behaviour_logprobs,
        episode=completion.sample,
        group=group,
        turns=((start, start + length),),
        finish=completion.finish,
        policy_version=completion.policy_version,
        supports=None if completion.supports is None else (b"",) * start + completion.supports,
        versions=completion.versions and tuple((start + a, start + b, v) for a, b, v in completion.versions),
    )


@lru_cache(maxsize=8192)
def _answer_roles(length: int, stopped: bool) -> tuple[int, ...]:
    return tuple(response_roles(torch.tensor([length]), torch.tensor([stopped]), width=length)[0].tolist())
