"""`rolecall demo` on the terminal: a table, answers before and after, and what to try next."""

from shlex import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rolecall.cli.progress import display
from rolecall.config.use import DemoOptions
from rolecall.jobs.demo import LEARNS_FROM, TASK, Demo, demo
from rolecall.train.progress import duration
from rolecall.visible import visible_text


def run(options: DemoOptions) -> int:
    """Run the demo and show what came out."""
    shown = display(quiet=options.quiet)
    made = demo(out=options.out, quick=options.quick, seed=options.seed, quiet=options.quiet, progress=shown)
    console = Console()
    console.print()
    console.print(_table(made))
    console.print(_answers(made))
    _next(console, made)
    return 0


def _table(made: Demo) -> Table:
    table = Table(
        title=f"right answers to {len(made.start.evaluation.answers)} held-out {TASK} problems", title_justify="left"
    )
    for column in ("run", "learns from", "greedy", "gain", "sampled", "gain", "time"):
        table.add_column(column, justify="left" if column in ("run", "learns from") else "right")
    base = made.start.evaluation.numbers
    for stage in made.stages:
        numbers = stage.evaluation.numbers
        cells = []
        for name in ("accuracy", "avg@4"):
            gain = "" if stage is made.start else f"{100 * (numbers[name] - base[name]):+.1f}"
            cells += [f"{numbers[name]:.1%}", gain]
        table.add_row(stage.name, LEARNS_FROM[stage.name], *cells, duration(stage.seconds))
    judged = made.reward_model.evaluations[-1]
    table.caption = f"the reward model ranks {judged['eval_accuracy']:.1%} of held-out pairs right"
    return table


def _answers(made: Demo) -> Table:
    """Problems that the start got wrong, with every model's answer."""
    table = Table(title="answers before and after", title_justify="left")
    for column in ("prompt", "sft", "ppo", "grpo", "right answer"):
        table.add_column(column)
    wrong = [i for i, score in enumerate(made.start.evaluation.scores) if not score]
    for i in wrong[:5]:
        prompt = str(made.start.evaluation.prompts[i])
        cells = [Text(visible_text(prompt))]
        for stage in made.stages:
            answer, score = stage.evaluation.answers[i], stage.evaluation.scores[i]
            cells.append(Text(visible_text(answer), style="green" if score else "red"))
        digits = "".join(sorted(c for c in prompt if c.isdigit()))
        table.add_row(*cells, Text(digits))
    return table


def _next(console: Console, made: Demo) -> None:
    start, grpo = quote(str(made.start.path)), quote(str(made.grpo.path))
    lines = [
        "",
        f"The four runs are in {made.path} and took {duration(made.seconds)} in all. To look at them, open",
        f"  {made.report}",
        "Next, try:",
        f'  rolecall generate --model {grpo} --prompt "sort 91372=" --show tokens',
        f"  rolecall eval --model {grpo} --rows {TASK} --samples 8 --against {start} --sampling.max_new_tokens 8",
        f"  rolecall rl --preset reinforce --model {start} --rows {TASK} --sampling.max_new_tokens 8 "
        "--optim.lr 3e-4 --eval.every 20",
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
