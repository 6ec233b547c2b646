"""`rolecall plan`: what a run would take, before it is paid for."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.config.memory import TINY
from rolecall.config.planning import PlanOptions
from rolecall.errors import UserError
from rolecall.planning import cost
from rolecall.planning.cost import Batch, Memory, Shape, Step
from rolecall.planning.hardware import DEVICES, Device
from rolecall.planning.simulate import Fleet, Simulated, simulate

WORKERS = (8, 32, 128, 512, 2048, 4096)
"""Sizes that are simulated."""
_SIMULATED_ANSWERS = 2**15
"""Answers of a simulated step at most; larger fleets have fewer slots in a worker."""

_MOST_FAILURES = 3.0
"""While the longest answer grows; one in 20 would be done at the first attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What was worked out."""

    shape: Shape
    device: Device
    train: int
    """GPUs that train."""
    sample: int
    """GPUs that sample; 0: those that train do it in turn."""
    memory: Memory
    """Of a GPU that trains."""
    budget: int | None
    """The largest micro-batch that fits; None if none does."""
    replica: int | None
    """GPUs that hold the model once for sampling; None if 64 do not."""
    slots: int
    """Answers that one replica grows at a time."""
    likely: Step
    best: Step
    worst: Step
    gpu_hours: dict[int | None, tuple[float, float, float]]
    """Of 1,000 steps, by steps ahead (None: in flight): (likely, best, worst)."""

    @property
    def fits(self) -> bool:
        """Whether training and sampling have room."""
        return self.budget is not None and self.replica is not None and self.replica <= (self.sample or self.train)


def plan(options: PlanOptions) -> Plan:
    """The plan of a run."""
    shape, device = _shape(options.model), _device(options.gpu)
    batch = _batch(options)
    network = options.network * 1e9
    sample = options.sample_gpus
    if sample is None:
        sample = cost.balanced(shape, batch, device, gpus=options.gpus, network=network)
    train = options.gpus - sample
    how: dict[str, Any] = {"gpus": train, "reference": options.reference, "lora_rank": options.lora_rank}
    context = batch.prompt + batch.longest
    replica = cost.replica_gpus(shape, device, context=context)
    steps = [
        cost.step(shape, batch, device, train=train, sample=sample, network=network, reached=reached)
        for reached in (cost.LIKELY, cost.BEST, cost.WORST)
    ]
    modes: tuple[int | None, ...] = (0, *sorted({1, 3, steps[0].useful_ahead}), None) if sample else (0,)
    hours = {k: [one.seconds(k) * options.gpus * 1000 / 3600 for one in steps] for k in modes}
    return Plan(
        shape=shape,
        device=device,
        train=train,
        sample=sample,
        memory=cost.trainer_memory(shape, batch, **how),
        budget=cost.largest_budget(shape, batch, device, **how),
        replica=replica,
        slots=cost.slots(shape, device, gpus=replica or 1, context=context),
        likely=steps[0],
        best=steps[1],
        worst=steps[2],
        gpu_hours={k: (found[0], found[1], found[2]) for k, found in hours.items()},
    )


def simulated(options: PlanOptions, found: Plan, *, steps: int = 8) -> Iterator[Simulated]:
    """The plan's workers, and more of them: by size and mode. A worker is a replica."""
    batch, replica = _batch(options), found.replica or 1
    growing = min(found.slots, max(1, -(-batch.answers // max(1, (found.sample or found.train) // replica))))
    token = cost.decode_seconds(
        found.shape,
        found.device,
        growing=growing,
        context=batch.prompt + batch.answer / 2,
        gpus=replica,
        reached=cost.LIKELY,
    )
    for workers in WORKERS:
        fleet = Fleet(
            slots=max(1, min(growing, _SIMULATED_ANSWERS // workers)),
            token_seconds=token,
            mean=batch.answer,
            spread=options.spread,
            longest=int(batch.longest),
            train_seconds=found.likely.train + found.likely.sync,
            failures_per_day=options.failures_per_day,
            slow_share=options.slow_share,
        )
        if fleet.longest_seconds * options.failures_per_day / 86400 > _MOST_FAILURES:
            raise UserError(
                f"the longest answer takes {fleet.longest_seconds:,.0f} s and a worker fails every "
                f"{86400 / options.failures_per_day:,.3g} s, so no step would end: give fewer failures_per_day, or a shorter longest"
            )
        yield from simulate(fleet, workers, aheads=(0, 1, 3, None), steps=steps)


def _batch(options: PlanOptions) -> Batch:
    return Batch(
        answers=options.prompts * options.samples,
        prompt=options.prompt_tokens,
        answer=options.answer_tokens,
        longest=options.longest,
        same_prompt=options.samples,
        epochs=options.epochs,
        scoring=1 + options.reference,
        token_budget=options.token_budget,
    )


def _device(name: str) -> Device:
    if name not in DEVICES:
        raise UserError(f"there is no GPU {name!r} in the table: choose one of {', '.join(DEVICES)}")
    return DEVICES[name]


def _shape(model: str) -> Shape:
    config = _config(model)
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    odd = [name for name in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(name)]
    if odd:
        raise UserError(f"{model} is a mixture of experts ({odd[0]}), which the cost model does not cover")
    try:
        return Shape.of(config)
    except KeyError as error:
        raise UserError(f"the config of {model} is not that of a dense decoder: it has no {error.args[0]}") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"the config of {model} is not that of a dense decoder: {error}") from error


def _config(model: str) -> dict[str, Any]:
    """A model's config.json, without its weights."""
    if model == "tiny":
        return dict(TINY)
    path = Path(model).expanduser()
    for place in (path, path / "model" / "config.json", path / "config.json"):
        if place.is_file():
            try:
                return dict(json.loads(place.read_text()))
            except (ValueError, TypeError) as error:
                raise UserError(f"{place} is not a JSON object: give a model's config.json or directory") from error
    if path.exists() or model.count("/") != 1:
        raise UserError(f"there is no config.json at {model}: give a model's directory, its config.json, or a hub id")
    from huggingface_hub import hf_hub_download

    try:
        return dict(json.loads(Path(hf_hub_download(model, "config.json")).read_text()))
    except Exception as error:
        raise UserError(f"the config of {model} could not be read from the hub: {error}") from error
