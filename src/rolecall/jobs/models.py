"""Models from what a user gives: a name, a run, an adapter's directory, or objects from Python.

Every command and option that takes a model comes here, so all of them take the same things.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from rolecall.config.given import GivenObject, resolve_source
from rolecall.config.parts import PolicyOptions
from rolecall.config.plan import processes
from rolecall.config.use import server_key
from rolecall.errors import UserError
from rolecall.policy.heads import RewardModel
from rolecall.policy.load import LoadedModel, LoadError, from_objects, load, reading
from rolecall.policy.lora import (
    add_adapter,
    check_installed,
    continues,
    has_adapter,
    load_adapter,
    merge,
    merged,
    set_dropout,
)
from rolecall.policy.model import PolicyModel
from rolecall.policy.quantize import quantized
from rolecall.policy.sharded import in_parts
from rolecall.remote.adapter import adapter_alone, base_weights, can_be_merged
from rolecall.remote.probe import scored
from rolecall.remote.rehearsal import disturbed
from rolecall.rewards.model import RewardModelReward
from rolecall.rollout.engine import Engine
from rolecall.rollout.open import open_engine
from rolecall.rollout.pool import EnginePool
from rolecall.rollout.published import Adapter
from rolecall.rollout.units import UnitPool
from rolecall.serving.inside_vllm.rolecall_weights import merged as merge_adapter
from rolecall.train import checkpoint
from rolecall.train.manifest import DamagedCheckpointError, check_model
from rolecall.train.step import Updater
from rolecall.train.timing import Timer
from rolecall.types import Batch

_log = logging.getLogger("rolecall")


def model_directory(name: str) -> str:
    """A model's name; for a run's directory that of its final model, or of its latest checkpoint. Either is checked
    against its manifest, and so is a directory of our own that is given itself."""
    path = Path(name).expanduser()
    is_run = (path / "run.json").is_file()
    final = path / "model" if is_run else path
    if final.is_dir():
        try:
            check_model(final)
        except DamagedCheckpointError as error:
            raise UserError(str(error)) from error
    if not is_run:
        return name
    if final.is_dir():
        return str(final)
    found = checkpoint.latest(path / "checkpoints", read_only=True)
    if found is None or not (found.path / "config.json").is_file():
        raise UserError(f"the run {name} has no model and no checkpoint of one; let it train, or give another model")
    return str(found.path)


def open_model(name: str, **how: Any) -> LoadedModel:
    """The model to sample from, or whose weights all train; an adapter is merged into its base. `how` is for `load`."""
    loaded = _open(name, **how)
    if not has_adapter(loaded):
        return loaded
    _log.info("the adapter of %s is merged into its base model", name)
    return merge(loaded)


def open_policy(name: str, options: Any) -> LoadedModel:
    """The model to train, with an adapter if the options ask for one."""
    how = options.policy
    if how.lora_rank is None:
        return open_model(name, **_held(how))
    check_installed()
    policy = _open(name, **_held(how))
    alpha = how.lora_alpha if how.lora_alpha is not None else 2.0 * how.lora_rank
    targets = how.lora_targets or "all-linear"
    if has_adapter(policy):
        goes_on = how.quantize == "none" and continues(
            policy, rank=how.lora_rank, alpha=how.lora_alpha, targets=how.lora_targets, rs=how.lora_rs
        )
        if goes_on:
            _log.info("training continues with the adapter of %s", name)
            before, model = policy.model.peft_config["default"].lora_dropout, policy.model
            if before and before != how.lora_dropout:
                _log.warning(
                    "the adapter of %s was made with dropout %g and trains on with policy.lora_dropout, which is %g",
                    name,
                    before,
                    how.lora_dropout,
                )
            set_dropout(model, how.lora_dropout, seed=options.seed)
            return policy
        why = "the model is quantised" if how.quantize != "none" else "its LoRA settings are others"
        _log.warning("the adapter of %s is merged, and a new one goes on top: %s", name, why)
        policy = merge(policy)
    if how.quantize != "none":
        policy = quantized(policy, how.quantize)
    return add_adapter(
        policy,
        rank=how.lora_rank,
        alpha=alpha,
        target_modules=targets,
        rs=how.lora_rs,
        dropout=how.lora_dropout,
        seed=options.seed,
    )


def open_reward_model(name: str, **how: Any) -> RewardModel:
    """A reward model, to train on or to start a critic from."""
    return RewardModel.load(model_directory(name), **how)


def reward_of_model(source: str, **how: Any) -> RewardModelReward:
    """A reward model as a reward; `how` is for `RewardModelReward.load`."""
    return RewardModelReward.load(model_directory(source), **how)


def start_reward_model(name: str, options: Any) -> RewardModel:
    """A language model with a head of zeros, which prefers nothing; or a reward model that trains on."""
    how = _held(options.policy)
    directory = Path(name if isinstance(name, GivenObject) else model_directory(name)).expanduser()
    if (directory / "config.json").is_file():
        architectures = AutoConfig.from_pretrained(
            directory, trust_remote_code=how["trust_remote_code"]
        ).architectures or [""]
        if "SequenceClassification" in architectures[0]:
            return open_reward_model(name, **how)
    return RewardModel.from_policy(open_model(name, **how), seed=options.seed)


def sampler(policy: LoadedModel, options: Any, *, timer: Timer | None = None, updater: Updater | None = None) -> Engine:
    """The engine that the options ask for, with the policy's weights. Workers and servers tell the timer how long they took.

    `updater` is what trains the policy, if anything does; servers are compared with it.
    """
    o = options.engine
    if o.servers or o.placed_servers:
        return _on_servers(policy, options, (timer or Timer()).add, updater)[0]
    plain = _plain(policy)
    how: dict[str, Any] = {"name": o.name, "dtype": engine_dtype(options), "max_rows": o.max_rows}
    if not o.workers:
        return open_engine(plain, **how)
    reads = reading(options.policy) | {"dtype": getattr(options.policy, "dtype", "float32")}
    pool: Any = EnginePool
    if o.cluster == "ray":
        from rolecall.rollout.ray_pool import RayPool  # and Ray, which nothing else needs

        pool = RayPool
    made: Engine = pool(plain, o, how=how, reads=reads, add=(timer or Timer()).add, adapter=_adapter(policy))
    return made


def _adapter(policy: LoadedModel) -> Adapter | None:
    """The policy's adapter for workers that keep its base; None if there is none, or they could not merge it."""
    if not has_adapter(policy) or in_parts(policy.model):
        return None
    trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    with disturbed(trained):
        if not can_be_merged(policy):
            _log.info("the adapter cannot be published alone: workers get whole weights, with it merged in")
            return None
    return Adapter(base=base_weights(policy), now=partial(adapter_alone, policy), merge=merge_adapter)


def samplers(
    policy: LoadedModel, options: Any, lanes: int, *, timer: Timer, updater: Updater, stack: ExitStack
) -> list[Engine]:
    """Up to so many engines that hold a version each and sample at the same time: sides of one pool of workers, sides of servers that
    hold versions of an adapter side by side, or shares of the servers. Where the process itself samples, it is one engine. They
    are closed with the stack."""
    o, engines = options.engine, list[Engine]()
    if lanes > 1 and has_adapter(policy) and (o.servers or o.placed_servers):
        held = _on_servers(policy, options, timer.add, updater, versions=lanes)
        for engine in held:
            stack.callback(engine.close)
        if len(held) > 1 or len(o.servers) < 2 * processes():
            return held
        held[0].close()
    count = max(1, min(lanes, len(o.servers) // processes()))
    for i in range(count):
        share = replace(options, engine=replace(o, servers=o.servers[i::count])) if count > 1 else options
        engines.append(sampler(policy, share, timer=timer, updater=updater))
        stack.callback(getattr(engines[i], "close", lambda: None))
    pool, sides = engines[0], min(lanes, o.workers)
    return [pool.side() for _ in range(sides)] if sides > 1 and isinstance(pool, UnitPool) else engines


def _plain(policy: LoadedModel) -> LoadedModel:
    """The policy as one whole model, an adapter merged; itself if it is that."""
    return merged(policy) if has_adapter(policy) or in_parts(policy.model) else policy


def _on_servers(
    policy: LoadedModel, options: Any, add: Callable[[str, float], None], updater: Updater | None, *, versions: int = 1
) -> list[Any]:
    """An engine over this process's share of the servers; or several over the same ones, if they can hold `versions` of an
    adapter side by side."""
    from rolecall.remote.engine import ServerEngine  # and httpx, which nothing else needs

    o, rank = options.engine, int(os.environ.get("RANK", "0"))
    where: dict[str, Any] = {"urls": o.servers[rank :: processes()], "key": server_key()}
    close: Callable[[], None] = lambda: None
    if o.placed_servers:
        from rolecall.remote.placed import PlacedServers  # and Ray

        placed = PlacedServers(options.model, o, count=len(range(rank, o.placed_servers, processes())))
        where, close = {"urls": placed.urls, "key": placed.key}, placed.close
    mixed = getattr(options.policy, "mixed_precision", "no") == "bf16"
    alone = partial(scored, PolicyModel(policy.model), temperature=1.0, token_budget=8192)
    made = partial(
        ServerEngine,
        _plain(policy),
        options.engine,
        tokenizer=fingerprint(policy),
        scorer=alone if updater is None else partial(_scored_by, updater),
        plain=partial(_plain, policy),
        sampling=options.sampling,
        trainer=torch.bfloat16 if mixed else policy.model.dtype,
        lora=policy if has_adapter(policy) and not in_parts(policy.model) else None,
        add=add,
        **where,
    )
    engines = [made(versions=versions, also_close=close)]
    try:
        count, base = engines[0].versions, engines[0].base
        engines += (made(versions=count, slot=slot, base=base) for slot in range(1, count))
    except BaseException:
        for engine in reversed(engines):
            engine.close()
        raise
    return engines


def _scored_by(updater: Updater, batch: Batch, wanted: Tensor) -> Tensor:
    """How servers are compared with the policy as it is now."""
    with updater.autocast():
        return scored(updater.module, batch, wanted, temperature=1.0, token_budget=updater.token_budget)


def as_served(options: Any, engine: Engine) -> Any:
    """The options with what servers turn out to be; as they are for any other engine."""
    about = getattr(engine, "about", None)
    if about is None:
        return options
    return replace(options, engine=replace(options.engine, name=about.engine, dtype=about.dtype))


def engine_dtype(options: Any) -> torch.dtype | None:
    """The sampler's dtype; None if it is the model's."""
    return None if options.engine.dtype is None else getattr(torch, options.engine.dtype)


def fingerprint(policy: LoadedModel) -> str:
    """Tells tokenizers apart: a hash of the vocabulary."""
    vocabulary = sorted(policy.tokenizer.get_vocab().items())
    return hashlib.sha256(repr(vocabulary).encode()).hexdigest()


def _held(policy: PolicyOptions) -> dict[str, Any]:
    """How a model is loaded to train, as keywords of `load`."""
    return {"dtype": policy.dtype, "gradient_checkpointing": policy.gradient_checkpointing, **reading(policy)}


def _open(name: str, **how: Any) -> LoadedModel:
    """The model as it is, with the adapter that it may carry."""
    given = resolve_source(name, "model")
    if given is not name:
        if how.pop("attention", "auto") != "auto":
            raise UserError("policy.attention is for models that are loaded: set attn_implementation of the given one")
        how.pop("trust_remote_code", None)  # its code runs already
        return from_objects(*given, name=str(name), **how)
    place = model_directory(name)
    base = _base_of(Path(place).expanduser())
    if base is None:
        return load(place, **how)
    check_installed()
    try:
        return load_adapter(load(model_directory(base), **how), Path(place).expanduser())
    except LoadError as error:
        raise LoadError(f"adapter {name!r} on {base!r}: {error}") from error


def _base_of(directory: Path) -> str | None:
    """The base model that an adapter's directory names; None if it is no adapter."""
    path = directory / "adapter_config.json"
    if (directory / "config.json").is_file() or not path.is_file():
        return None
    try:
        base = json.loads(path.read_text())["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise LoadError(f"adapter {str(directory)!r}: adapter_config.json cannot be read; copy it again") from error
    if not base:
        raise LoadError(
            f"adapter {str(directory)!r} does not name its base model: set base_model_name_or_path in {path}"
        )
    return str(base)
