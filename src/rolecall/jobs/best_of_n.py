"""`rolecall best-of-n`: sample n answers to every prompt, keep the best."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolecall.config.best_of_n import BestOfNOptions
from rolecall.config.parts import HeldOutOptions
from rolecall.errors import UserError
from rolecall.jobs.arguments import trl_arguments
from rolecall.jobs.calls import Job, train
from rolecall.jobs.data import check_prompts, open_reward, prompt_rows
from rolecall.jobs.models import fingerprint, open_model, sampler
from rolecall.jobs.running import Built, Run, unless_failed
from rolecall.policy.load import reading
from rolecall.recipes.ask import Asker
from rolecall.recipes.best_of_n import BestOfN
from rolecall.tasks.names import is_task
from rolecall.tasks.sources import RowsSource
from rolecall.tasks.streams import head
from rolecall.train.callbacks import Given
from rolecall.train.loop import LoopOptions
from rolecall.train.progress import Progress
from rolecall.train.rundir import RunDir
from rolecall.train.state import read_state, write_state


@trl_arguments
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
    given = {"rows": rows, "reward": reward, "judge": judge}
    return train(BestOfNOptions, settings, given, progress=progress, callbacks=callbacks, ends=unless_failed)


def build(job: Job) -> Built:
    """The parts of a run."""
    options, objects, stack, timer = job.options, job.given, job.stack, job.timer
    if job.accelerator.num_processes > 1:
        raise UserError("best-of-n runs in one process: start it without accelerate launch")
    held_out = HeldOutOptions(every=1, rows=options.count) if options.split == "test" else HeldOutOptions()
    source = job.rows
    if options.split == "test" and not (isinstance(source, str) and is_task(source)):
        raise UserError("split is for tasks: these rows are used as they are, so leave it out")
    given = prompt_rows(source, held_out, seed=options.seed)
    task_reward = given.reward
    found = head(given.train if given.test is None else given.test, options.count)
    how: dict[str, Any] = {**options.reward_limits(), "rows": found, "timer": timer}
    reward = open_reward(objects.reward or options.reward, task_reward, stack, weights=options.reward_weights, **how)
    judge = None
    if objects.judge or options.judge:
        judge = open_reward(objects.judge or options.judge, task_reward, stack, weights=None, **how)
    policy = open_model(options.model, **reading(options.policy))
    check_prompts(found, policy, options.chat)
    engine = sampler(policy, options)
    asker = Asker(
        policy=policy,
        engine=engine,
        reward=reward,
        rows=found,
        chat=options.chat,
        sampling=options.sampling,
        timer=timer,
    )
    learner = BestOfN(options, asker=asker, judge=judge, model=engine.hash, tokenizer=fingerprint(policy))

    def watch(run: RunDir) -> None:
        learner.run = run

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
        save_model=None,
        is_finite=lambda: True,
        watch_run=watch,
        finish=learner.finish,
    )
