"""Episodes with a scripted policy, on the built-in tokenizer."""

from collections.abc import Callable, Sequence
from typing import Any

from rolecall.agents.conversation import Dialect
from rolecall.agents.play import Player
from rolecall.agents.played import Played, Wanted
from rolecall.agents.pool import LocalEnvs
from rolecall.config.agents import AgentOptions
from rolecall.maths.roles import Role
from rolecall.policy.tiny import CONTEXT_LENGTH, TURN_END_ID, tiny_tokenizer
from rolecall.rollout.scripted import ScriptedEngine
from rolecall.types import Sampling, Trajectory

TOKENIZER = tiny_tokenizer()
DIALECT = Dialect(tokenizer=TOKENIZER, stop_ids=(TURN_END_ID,))
LETTERS = {
    Role.PROMPT: "P",
    Role.CONTENT: "C",
    Role.STOP: "S",
    Role.OBSERVATION: "O",
}


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def talker(*lines: str, stop: bool = True) -> ScriptedEngine:
    """Says the lines in turn (the last one for ever), counted by the answers that the prompt asks for."""

    def script(request, sample):
        turn = TOKENIZER.decode(request.prompt_ids).count("<|im_start|>assistant") - 1
        return encode(lines[min(turn, len(lines) - 1)]) + [TURN_END_ID] * stop

    return ScriptedEngine(script, stop_ids=(TURN_END_ID,))


def player(env: Any, engine: Any, **options: Any) -> Player:
    """`env` is a class, or environments that are running."""
    more = {name: options.pop(name) for name in ("clock",) if name in options}
    length = options.pop("context_length", CONTEXT_LENGTH)
    dialect = options.pop("dialect", DIALECT)
    envs = LocalEnvs(env) if callable(env) else env
    return Player(
        engine=engine, envs=envs, dialect=dialect, options=AgentOptions(**options), context_length=length, **more
    )


def play(
    env: Callable[[], Any],
    engine: Any,
    rows: Sequence[dict] = ({},),
    *,
    n: int = 1,
    new_tokens: int = 32,
    temperature: float = 1.0,
    **options: Any,
) -> list[Played]:
    wanted = [Wanted(prompt=i, sample=k, row=row, seed=i) for i, row in enumerate(rows) for k in range(n)]
    sampling = Sampling(max_new_tokens=new_tokens, temperature=temperature)
    return player(env, engine, **options).play(wanted, sampling, seed=0, step=0)


def spoken(trajectory: Trajectory) -> list[tuple[str, str, str]]:
    """(author, roles, text) of each run of tokens by one author; a run of equal roles is one letter."""
    found = []
    for start, end, author in trajectory.authors or ():
        letters = [LETTERS[Role(role)] for role in trajectory.roles[start:end]]
        short = "".join(c for i, c in enumerate(letters) if i == 0 or letters[i - 1] != c)
        found.append((author, short, TOKENIZER.decode(trajectory.ids[start:end])))
    return found
