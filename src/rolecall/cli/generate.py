"""`rolecall generate`: print the answers."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from math import isnan

from rolecall.config.generate import GenerateOptions
from rolecall.jobs.generate import Answer, Generated, Prompt
from rolecall.jobs.generate import run as generate
from rolecall.maths.roles import Role
from rolecall.visible import visible_text, visible_token


def run(options: GenerateOptions) -> None:
    """Answers on stdout, a summary on stderr."""
    generated = generate(options)
    asked = None
    for answer in generated.answers:
        if options.json:
            print(json.dumps(_row(answer), ensure_ascii=False))
            continue
        if answer.trajectory.group != asked:
            asked = answer.trajectory.group
            print(f"> {visible_text(_prompt_text(answer.prompt))}")
        print(f"--- answer {answer.trajectory.episode}: {answer.finish}, {len(answer.ids)} tokens, {_logprob(answer)}")
        if options.show == "tokens":
            print("\n".join(_table(answer)))
        else:
            print(visible_text(answer.text))
    sys.stdout.flush()
    print(_summary(generated, options), file=sys.stderr)


def _row(answer: Answer) -> dict[str, object]:
    trajectory = answer.trajectory
    return {
        "prompt": answer.prompt,
        "text": answer.text,
        "finish": answer.finish,
        "group": trajectory.group,
        "sample": trajectory.episode,
        "ids": trajectory.ids,
        "roles": [Role(role).name.lower() for role in trajectory.roles],
        "logprobs": [None if isnan(value) else value for value in trajectory.behaviour_logprobs or ()],
    }


def _prompt_text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n> ".join(f"{message['role']}: {message.get('content', '')}" for message in prompt)


def _logprob(answer: Answer) -> str:
    return f"log-prob {sum(answer.logprobs):.2f}"


def _table(answer: Answer) -> Iterator[str]:
    """A line per token. The policy did not choose the prompt, so it has no log-prob there."""
    trajectory = answer.trajectory
    yield "   pos  role     log-prob      id  token"
    rows = zip(trajectory.roles, trajectory.behaviour_logprobs or (), trajectory.ids, answer.tokens, strict=True)
    for position, (role, logprob, token, text) in enumerate(rows):
        shown = f"{'-' if isnan(logprob) else f'{logprob:.3f}':>8}"
        yield f"{position:6}  {Role(role).name.lower():7}  {shown}  {token:6}  {visible_token(text)}"


def _summary(generated: Generated, options: GenerateOptions) -> str:
    answers = generated.answers
    tokens = sum(len(answer.ids) for answer in answers)
    ends = ", ".join(f"{count} {finish}" for finish, count in Counter(str(a.finish) for a in answers).most_common())
    speed = tokens / max(generated.seconds, 1e-9)
    return (
        f"{len(answers)} answer{'s' * (len(answers) != 1)} ({ends}), {tokens} tokens in {generated.seconds:.2f} s: "
        f"{speed:.0f} tokens/s ({generated.engine} engine, {options.dtype})"
    )
