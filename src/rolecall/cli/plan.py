"""`rolecall plan` on the terminal."""

from pathlib import Path

from rolecall.config.planning import PlanOptions
from rolecall.errors import UserError
from rolecall.planning.picture import bar, svg


def run(options: PlanOptions) -> int:
    """The plan; 1 if it does not fit."""
    from rolecall.jobs.plan import plan, simulated

    found = plan(options)
    gpu, memory = options.gpu, found.memory
    limit = found.device.memory / 1e9
    print(f"{options.model}: {found.shape.parameters / 1e9:.3g} billion parameters; {gpu}: {found.device.source}")
    print(
        f"each of {found.train} training GPUs: {memory.total / 1e9:.3g} of {limit:.3g} GB (weights, gradients and moments "
        f"{memory.states / 1e9:.3g}, reference {memory.reference / 1e9:.3g}, gathered layers {memory.gathered / 1e9:.3g}, activations "
        f"{memory.activations / 1e9:.3g})"
    )
    if not found.fits:
        why = "training does not fit" if found.budget is None else "the model does not fit for sampling"
        print(f"{why}: use more GPUs, larger ones, --lora_rank 16, or shorter answers")
        return 1
    where = f"{found.sample} sampling GPUs" if found.sample else "the same GPUs, in turn"
    print(f"{where}: {found.replica} hold the model once, and grow up to {found.slots} answers at a time")
    print("\nseconds of a step, likely (best to worst); GPU hours of 1,000 steps")
    for name in ("generate", "train", "sync"):
        values = [getattr(one, name) for one in (found.likely, found.best, found.worst)]
        print(f"  {name:14} {values[0]:9.3g} ({values[1]:.3g} to {values[2]:.3g})")
    for ahead, hours in found.gpu_hours.items():
        values = [one.seconds(ahead) for one in (found.likely, found.best, found.worst)]
        paid = [f"{one * options.price:,.0f}" for one in hours] if options.price is not None else []
        cost = f", cost {paid[0]} ({paid[1]} to {paid[2]})" if paid else ""
        mode = "in flight" if ahead is None else f"async.ahead {ahead}" if ahead else "in turn"
        print(
            f"  {mode:14} {values[0]:9.3g} ({values[1]:.3g} to {values[2]:.3g}), {hours[0]:,.3g} GPU hours "
            f"({hours[1]:,.3g} to {hours[2]:,.3g}){cost}"
        )
    print(
        f"\nsettings: {_settings(options, found.train, found.budget, found.likely.useful_ahead if found.sample else 0)}"
    )
    print("From formulas and data sheets (docs/plan.md), never measured on a GPU.")
    if options.simulate:
        _show(options, list(simulated(options, found)))
    return 0


def _settings(options: PlanOptions, train: int, budget: int | None, ahead: int) -> str:
    words = [f"torchrun --nproc_per_node {train} -m rolecall" if train > 1 else "rolecall", "rl"]
    words += [f"--prompts {options.prompts} --samples {options.samples}", f"--optim.token_budget {budget}"]
    words += ["--policy.mixed_precision bf16", "--policy.gradient_checkpointing"]
    words += ["--train.shard fsdp2"] if train > 1 else []
    words += [f"--policy.lora_rank {options.lora_rank}"] if options.lora_rank else []
    words += [f"--algorithm.epochs {options.epochs}"] if options.epochs > 1 else []
    return " ".join([*words, *([f"--engine.servers URL,… --async.ahead {ahead}"] if ahead else [])])


def _show(options: PlanOptions, rows: list) -> None:
    print("\nsimulated: # answers grow, x lost to failures, . slots wait (for the longest answers or the trainer)")
    for row in rows:
        name = f"{row.workers} workers, {row.mode}"
        print(f"  {name:22} {row.seconds:8.3g} s  {bar(row.sampling, row.lost)}")
    if options.picture is not None:
        try:
            Path(options.picture).expanduser().write_text(svg(rows))
        except OSError as error:
            why = f"the picture cannot be written to {options.picture} ({error.strerror}): give another file"
            raise UserError(why) from error
        print(f"picture: {options.picture}")
