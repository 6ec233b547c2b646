"""The pool of lessons of a run, and who distils them, from the names a user gives."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from rolecall.agents.distil import Distil, by_function, by_policy, by_server
from rolecall.agents.embedding import by_embedding
from rolecall.agents.episodes import Arena
from rolecall.agents.guided import Lessons
from rolecall.agents.lessons import LessonPool
from rolecall.agents.programs import ProgramPlayer
from rolecall.config.given import resolve_source
from rolecall.config.rl import RLOptions
from rolecall.errors import UserError
from rolecall.train.ranks import Ranks
from rolecall.workers.load import load_object, split_name


def open_lessons(options: RLOptions, arena: Arena, ranks: Ranks, stack: ExitStack) -> Lessons | None:
    """The lessons that episodes read; None if they read none."""
    o = options.lessons
    if not o.on:
        return None
    if isinstance(arena.player, ProgramPlayer):
        raise UserError(
            "a program writes its prompts itself, so its episodes cannot be given lessons: leave out lessons.share"
        )
    _check_template(arena)
    pool = LessonPool(o, nearest=None if o.recall == "bm25" else by_embedding(o.recall))
    return Lessons(o, pool, _distiller(options, arena, stack), tokenizer=arena.policy.tokenizer, ranks=ranks)


def _distiller(options: RLOptions, arena: Arena, stack: ExitStack) -> Distil:
    o = options.lessons
    by: str | Callable[..., object] = resolve_source(o.by, "function that distils lessons")
    sampling = replace(options.sampling, max_new_tokens=o.max_tokens, stop_strings=())
    if callable(by):
        return by_function(by, getattr(by, "__name__", "the function"))
    if by == "policy":
        return by_policy(
            arena.player.engine,
            arena.player.dialect,
            sampling,
            seed=options.seed,
            first_prompt=options.prompts,
            context=arena.policy.context_length,
        )
    if by.startswith(("http://", "https://")):
        from rolecall.remote.plain import PlainServer

        server = PlainServer(by, model=o.served_model)
        stack.callback(server.close)
        return by_server(server, sampling, seed=options.seed)
    what = f"lessons.by {by!r}"
    if ":" not in by:
        raise UserError(f"{what} is none of policy, an address (http://host:8000/v1), and file.py:function")
    found = load_object(*split_name(by, what=what, error=UserError), what=what, error=UserError)
    if not callable(found):
        raise UserError(f"{what} is a {type(found).__name__}, not a function")
    return by_function(found, by)


def _check_template(arena: Arena) -> None:
    """Lessons are a message after the prompt's; some chat templates refuse two messages of the user's in a row."""
    twice = [{"role": "user", "content": "a task"}, {"role": "user", "content": "a lesson"}]
    try:
        arena.player.dialect.prompt(twice, given=1)
    except Exception as error:
        raise UserError(
            f"the chat template of {arena.policy.name!r} does not take lessons as a second message of the user's "
            f"({error}): leave out lessons.share, or give another template with chat.chat_template_kwargs"
        ) from error
