"""`rolecall propose`: rows that a model makes for an environment, kept if they can be solved, are new and of middling difficulty."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rolecall.agents.episodes import Arena, EnvOnly
from rolecall.agents.programs import Programs
from rolecall.agents.proposing import Novelty, Proposal, Sieve, proposals_in, question, solved, text_of
from rolecall.config.given import resolve_source
from rolecall.config.parts import HeldOutOptions
from rolecall.config.use import ProposeOptions
from rolecall.errors import UserError
from rolecall.files import write_atomically
from rolecall.jobs.agents import env_label, episode_rows, open_arena, open_envs
from rolecall.jobs.arguments import options_of
from rolecall.jobs.models import open_model, sampler
from rolecall.jobs.prompting import prompting_of
from rolecall.policy.load import LoadedModel, reading
from rolecall.recipes.collect import answer_text
from rolecall.recipes.rendering import rendered_prompt
from rolecall.remote.plain import PlainServer
from rolecall.rollout.engine import in_order
from rolecall.tasks.streams import head
from rolecall.types import Request, Sampling
from rolecall.workers.load import load_object, split_name

_log = logging.getLogger("rolecall")
PROVENANCE = "made_by"
"""The column of a row that says where it comes from; None of a row that was given."""
_SAMPLED_AT = 2**20
"""The step whose random numbers proposals are drawn with."""

Proposer = Callable[[Sequence[str]], list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposed:
    """What came of it."""

    path: Path
    """The rows."""
    given: int
    """How many of them were given."""
    made: int
    """How many are new."""
    dropped: Mapping[str, int]
    """Proposals that were not kept, by reason."""


def propose(*, env: Any, rows: Any = None, **settings: Any) -> Proposed:
    """Make rows: `propose(model="runs/agent", env="calculator", proposer="http://127.0.0.1:8000/v1", out="more.jsonl")`."""
    return run(options_of(ProposeOptions, {**settings, "env": env, "rows": rows}))


def run(options: ProposeOptions) -> Proposed:
    path = Path(options.out).expanduser()
    if path.exists() and not options.overwrite:
        raise UserError(f"{path} is there already: give another --out, or --overwrite")
    source = resolve_source(options.env, "environment")
    with ExitStack() as stack:
        rows, _ = episode_rows(source, options.rows, HeldOutOptions(), n=options.given, seed=options.seed)
        given = [dict(row) for row in head(rows, options.given)]
        envs = open_envs(source, options.agent, stack)
        if isinstance(envs, Programs) or len(envs.players) > 1:
            raise UserError(f"{env_label(source)} cannot check a solution: proposals need an environment of one player")
        policy = open_model(options.model, **reading(options.policy))
        chat = prompting_of(options.model).filled(options.chat)
        engine = sampler(policy, options)
        arena = open_arena(envs, options.agent, policy=policy, engine=engine, reward=EnvOnly(), chat=chat)
        ask = _proposer(options, stack, partial(_ask_policy, options, policy, engine, chat))
        texts = ask(_questions(options, arena, given))
        sieve = Sieve()
        found = [p for text in texts for p in proposals_in(text, list(given[0]))]
        sieve.drop("not a row of these fields with a solution", found.count(None))
        _sift(options, arena, [p for p in found if p is not None], given, policy, sieve)
    made = [
        {**p.row, PROVENANCE: {"proposer": options.proposer, "model": options.model, "env": env_label(source), "seed": options.seed,
                               "solution": list(p.solution), "solved_share": share}}
        for p, share in sieve.kept
    ]  # fmt: skip
    most = int(options.share * len(given) / (1 - options.share)) if options.share < 1 else len(made)
    if len(made) > most:
        sieve.drop(f"beyond a share of {options.share:g}", len(made) - most)
    lines = [*({**row, PROVENANCE: None} for row in given if options.share < 1), *made[:most]]
    if not made:
        reasons = "; ".join(f"{count} {why}" for why, count in sieve.dropped.items() if count)
        raise UserError(f"none of {len(found)} proposals was kept: {reasons}", exit_code=1)
    write_atomically(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
    return Proposed(path=path, given=len(lines) - len(made[:most]), made=len(made[:most]), dropped=sieve.dropped)


def _questions(options: ProposeOptions, arena: Arena, given: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the proposer is asked, n times: some rows each time, taken in turn, and how the policy played them."""
    seen = dict(enumerate(given[: options.n * options.explore]))
    episodes = arena.play(seen, options.sampling, n=1, seed=options.seed, step=0, groups={i: i for i in seen})
    played = {e.wanted.prompt: next(iter(e.sides.values())).messages for e in episodes}
    asked = [[(i * options.explore + k) % len(seen) for k in range(options.explore)] for i in range(options.n)]
    return [question([seen[i] for i in numbers], [played[i] for i in numbers]) for numbers in asked]


def _sift(
    options: ProposeOptions,
    arena: Arena,
    found: Sequence[Proposal],
    given: Sequence[Mapping[str, Any]],
    policy: LoadedModel,
    sieve: Sieve,
) -> None:
    """Keep what can be solved, is new, and is neither too easy nor too hard for the policy as it is."""
    envs = arena.player.envs  # type: ignore[union-attr]
    works = solved(envs, found, seed=options.seed, enough=options.solved) if found else []
    sieve.drop("its solution does not solve it", works.count(False))
    embed = partial(_embedded, policy)
    novel = Novelty([text_of(row) for row in given], embed, words=options.words, meaning=options.meaning)
    able = [p for p, right in zip(found, works, strict=True) if right]
    fresh = [p for p in able if novel.takes(text_of(p.row))]
    sieve.drop("too much like another row", len(able) - len(fresh))
    rows = {i: p.row for i, p in enumerate(fresh)}
    if not rows:
        return
    groups = {i: i for i in rows}
    episodes = arena.play(rows, options.sampling, n=options.tries, seed=options.seed, step=1, groups=groups)
    for i, p in enumerate(fresh):
        own = [e.rewards for e in episodes if e.wanted.prompt == i]
        share = sum(sum(r.values()) >= options.solved for r in own) / len(own)
        if options.easiest >= share >= options.hardest:
            sieve.kept.append((p, share))
        else:
            sieve.drop("too easy" if share > options.easiest else "too hard")


def _proposer(options: ProposeOptions, stack: ExitStack, policy: Proposer) -> Proposer:
    """Who proposes: the policy, a served model, or a function (questions) -> answers."""
    who = options.proposer
    if who == "policy":
        return policy
    if who.startswith(("http://", "https://")):
        server = PlainServer(who)
        stack.callback(server.close)
        sampling = Sampling(max_new_tokens=options.proposal_tokens)

        def ask(questions: Sequence[str]) -> list[str]:
            prompts = [[{"role": "user", "content": text}] for text in questions]
            return [one.text for (one,) in server.answers(prompts, sampling, n=1, seed=options.seed, template={})]

        return ask
    what = f"proposer {who!r}"
    function = load_object(*split_name(who, what=what, error=UserError), what=what, error=UserError)

    def call(questions: Sequence[str]) -> list[str]:
        answers = function(list(questions))
        if not isinstance(answers, list) or len(answers) != len(questions):
            raise UserError(f"{who} must return a list with a text for each of {len(questions)} questions")
        return [str(answer) for answer in answers]

    return call


def _ask_policy(
    options: ProposeOptions, policy: LoadedModel, engine: Any, chat: Any, texts: Sequence[str]
) -> list[str]:
    sampling = Sampling(max_new_tokens=options.proposal_tokens)
    requests = []
    for i, text in enumerate(texts):
        ids = rendered_prompt({"prompt": [{"role": "user", "content": text}]}, policy=policy, chat=chat).ids
        if len(ids) + options.proposal_tokens > policy.context_length:
            raise UserError(
                f"a question of {len(ids)} tokens and {options.proposal_tokens} for its answer do not fit the context of "
                f"{policy.name} ({policy.context_length}): lower explore or proposal_tokens, or give a served model as proposer"
            )
        requests.append(Request(prompt_ids=ids, sampling=sampling, seed=options.seed, step=_SAMPLED_AT, prompt=i))
    return [answer_text(policy, c) for c in in_order(requests, engine.stream(requests))]


@torch.no_grad()
def _embedded(policy: LoadedModel, text: str) -> Tensor:
    """Where the policy puts a text: the mean of its last hidden states, of length 1."""
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"][: policy.context_length] or [0]
    hidden = policy.model.base_model(input_ids=torch.tensor([ids], device=policy.model.device)).last_hidden_state[0]
    return torch.nn.functional.normalize(hidden.float().mean(dim=0), dim=0).cpu()
