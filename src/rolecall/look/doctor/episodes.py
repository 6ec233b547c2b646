"""Checks of episodes: agents with turns and tools, and several agents that learn together."""

from collections.abc import Iterator

import numpy as np

from rolecall.look.doctor.finding import Finding
from rolecall.look.doctor.found import found
from rolecall.look.doctor.reading import Answers, Curve, Evidence, RunRecord
from rolecall.maths.codes import Role

_ILLEGAL = ("bad_actions", "illegal_moves", "not_numbers", "tool_failures")
"""What environments count when an answer is no action."""


def no_tool_calls(run: RunRecord) -> Iterator[Finding]:
    """A tool that was called is called in less than a tenth of as many episodes."""
    calls = run.counted("agents/tool_calls")
    if len(calls) < 8 or calls.first < 0.1:
        return
    steps = calls.lasting(lambda n: n < 0.1 * calls.first, least=3)
    if steps is None or steps[1] < calls.steps[-1]:
        return
    yield found(
        "no-tool-calls",
        "certain",
        steps,
        f"tool calls fell from {calls.first:.2g} to {calls.last:.2g} an episode: the policy no longer uses its tools",
        _scored(run.answers(steps)),
        f"--algorithm.kl_coef {max(1.0, 10 * run.number('algorithm.kl_coef', 0.0)):g}",
    )


def illegal_actions(run: RunRecord) -> Iterator[Finding]:
    """Four turns in ten are no action that the environment knows."""
    turns = run.curve("agents/turns")
    for name in _ILLEGAL:
        count = run.counted(f"agents/{name}")
        if not len(count):
            continue
        share = Curve(steps=count.steps, values=count.values / np.maximum(turns.values, 1e-9))
        steps = share.lasting(lambda s: s > 0.4)
        if steps is None:
            continue
        coef = run.number("algorithm.entropy_coef", 0.0)
        yield found(
            "illegal-actions",
            "certain",
            steps,
            f"{share.mean(steps):.0%} of the turns are no legal action ({name})",
            _scored(run.answers(steps), worst=True),
            "--algorithm.entropy_coef 0" if coef > 0 else "--sampling.temperature 0.7",
        )
        return


def turn_limit(run: RunRecord) -> Iterator[Finding]:
    """Half of the episodes end because of agent.max_turns."""
    cut = run.counted("agents/finish/max_turns")
    steps = cut.lasting(lambda share: share > 0.5) if len(cut) else None
    if steps is None:
        return
    answers, most = run.answers(steps), int(run.number("agent.max_turns", 16))
    yield found(
        "turn-limit",
        "certain",
        steps,
        f"{cut.mean(steps):.0%} of the episodes are cut off at {most} turns, before the environment ends them",
        () if answers is None else answers.most(np.where(answers.cut_off(), 1.0, np.nan)),
        f"--agent.max_turns {2 * most}",
    )


def epsilon_stuck(run: RunRecord) -> Iterator[Finding]:
    """At this pace half of the choices will still be random at the last step."""
    epsilon, played = run.curve("epsilon"), run.curve("env_steps")
    if len(epsilon) < 5 or len(played) != len(epsilon):
        return
    begin, end = run.number("q.epsilon_start", 1.0), run.number("q.epsilon_end", 0.05)
    whole = played.values[-1] / max(1, played.steps[-1]) * max(1.0, run.number("steps", played.steps[-1]))
    at_the_end = begin + min(1.0, whole / max(1.0, run.number("q.epsilon_steps", 1.0))) * (end - begin)
    if max(float(epsilon.values[-1]), 0.5) > epsilon.values[-1] or not at_the_end > 0.5:
        return
    yield found(
        "epsilon-stuck",
        "certain",
        (epsilon.steps[0], epsilon.steps[-1]),
        f"{epsilon.values[-1]:.0%} of the choices are random, and at the last step {at_the_end:.0%} will be: agents never "
        "play what they learn",
        (),
        f"--q.epsilon_steps {max(1, int(whole / 3))}" if end <= 0.5 else "--q.epsilon_end 0.05",
    )


def stale_target(run: RunRecord) -> Iterator[Finding]:
    """The target networks have moved by less than a tenth, or not at all."""
    taken = run.curve("optimizer_steps")
    if run.option("algo") not in ("iql", "vdn", "qmix") or len(taken) < 10:
        return
    done, every = max(0.0, float(taken.values.sum())), run.number("q.target_every", 200)
    tau = None if run.option("q.tau") is None else min(max(run.number("q.tau", 1.0), 0.0), 1.0)
    moved = 1 - (1 - tau) ** done if tau is not None else float(done >= every)
    if moved >= 0.1:
        return
    how = f"after {done:.0f} optimiser steps, copies are made every {every:g}" if tau is None else f"q.tau is {tau:g}"
    yield found(
        "stale-target",
        "certain",
        (taken.steps[0], taken.steps[-1]),
        f"the target networks are still {'those of the start' if not moved else f'{1 - moved:.0%} those of the start'}: {how}",
        (),
        "--q.tau 0.01",
    )


def idle_agent(run: RunRecord) -> Iterator[Finding]:
    """One agent does the same at 95 % of its choices and more, while another one does several things."""
    if run.files.command != "marl":
        return
    recorded = [run.answers((step, step)) for step in list(run.files.rollouts)[-2:]]
    if len(recorded) < 2 or any(answers is None for answers in recorded):
        return
    shares = [_commonest(answers) for answers in recorded if answers is not None]
    last = recorded[-1]
    assert last is not None
    for agent, now in shares[-1].items():
        others = [share for name, share in shares[-1].items() if name != agent]
        if min(now, shares[0].get(agent, 0.0)) > 0.95 and others and min(others) < 0.85:
            rows = np.array([1.0 if name == agent else np.nan for name in last.table["agent"].to_pylist()])
            first = recorded[0]
            assert first is not None
            yield found(
                "idle-agent",
                "likely",
                (first.step, last.step),
                f"{agent} does the same at {now:.0%} of its choices while others act",
                last.most(rows),
                "--rewards team" if run.option("rewards") == "individual" else "--ppo.entropy_coef 0.05",
            )
            return


def _commonest(answers: Answers) -> dict[str, float]:
    """By agent: the share of its commonest action among those that it chose."""
    chosen: dict[str, list[int]] = {}
    for agent, ids, roles in zip(
        answers.table["agent"].to_pylist(), answers.lists("ids"), answers.lists("roles"), strict=True
    ):
        if ids is not None and roles is not None:
            chosen.setdefault(agent, []).extend(ids[roles == Role.CONTENT].tolist())
    return {agent: max(map(acts.count, set(acts))) / len(acts) for agent, acts in chosen.items() if len(acts) >= 10}


def _scored(answers: Answers | None, *, worst: bool = False) -> Evidence:
    if answers is None:
        return ()
    scores = answers.column("score")
    return answers.most(-scores if worst else scores)
