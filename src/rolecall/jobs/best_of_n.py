"""`rolecall best-of-n`: sample n answers to every prompt, keep the best."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rolecall.config.parts import HeldOutOptions
from rolecall.config.training import BestOfNOptions
from rolecall.errors import UserError
from rolecall.jobs.building import Built, Job
from rolecall.jobs.data import check_prompts, open_reward, prompt_rows
from rolecall.jobs.models import fingerprint, open_model, sampler
from rolecall.jobs.running import Run, train
from rolecall.policy.load import reading
from rolecall.recipes.best_of_n import BestOfN
from rolecall.recipes.collect import Asker
from rolecall.tasks.names import is_task
from rolecall.tasks.sources import RowsSource
from rolecall.tasks.streams import head
from rolecall.train.callbacks import Given
from rolecall.train.loop import LoopOptions
from rolecall.train.progress import Progress
from rolecall.train.state import read_state, write_state


def best_of_n(
    *,
    rows: RowsSource | None = None,
    reward: Any = None,
    judge: Any = None,
    progress: Progress | None = None,
    callbacks: Sequence[Given] = (),
    **settings: Any,
) -> Run:
    """Best of n: `best_of_n(model="runs/sft-1", rows="data.jsonl", reward="runs/rm-1", n=16)`.

    The answers lie in `answers.jsonl` of the run, the curve over n in `best_of_n.json`. `rows` may be a list of dicts,
    `reward` and `judge` a function or a list of them. All other settings are those of `rolecall best-of-n`.
    """
    arguments = {**settings, "rows": rows, "reward": reward, "judge": judge}
    return train(BestOfNOptions, arguments, stops=False, progress=progress, callbacks=callbacks)


def build(job: Job) -> Built:
    options = job.options
    if job.accelerator.num_processes > 1:
        raise UserError("best-of-n runs in one process: start it without torchrun")
    held_out = HeldOutOptions(every=1, rows=options.count) if options.split == "test" else HeldOutOptions()
    if options.split == "test" and not is_task(options.rows):
        raise UserError("split is for tasks: these rows are used as they are, so leave it out")
    given = prompt_rows(options.rows, held_out, seed=options.seed)
    found = head(given.train if given.test is None else given.test, options.count)
    opened = partial(open_reward, rows=found, timer=job.timer)
    reward = opened(options.reward, given.reward, job.stack, options, weights=options.reward_weights)
    judge = opened(options.judge, given.reward, job.stack, options) if options.judge else None
    policy = open_model(options.model, **reading(options.policy))
    check_prompts(found, policy, options.chat)
    engine = sampler(policy, options)
    asker = Asker.of(options, policy=policy, engine=engine, reward=reward, rows=found, timer=job.timer)
    learner = BestOfN(options, asker=asker, judge=judge, model=engine.hash, tokenizer=fingerprint(policy))

    def write(directory: Path, extra: dict[str, Any]) -> None:
        write_state(directory, "trainer", {"extra": extra})

    def read(directory: Path) -> dict[str, Any]:
        extra: dict[str, Any] = read_state(directory, "trainer")["extra"]
        return extra

    return Built(
        learner=learner,
        loop=LoopOptions(
            steps=-(-len(found) // options.prompts),
            save_every=options.save.every,
            keep=options.save.keep,
            eval_every=0,
            main="reward",
        ),
        write=write,
        read=read,
        watch_run=partial(setattr, learner, "run"),
        finish=learner.finish,
    )
