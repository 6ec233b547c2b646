"""Checks of episodes: agents with turns and tools, and several agents that learn together."""

import numpy as np

from rolecall.look.doctor.finding import Seen
from rolecall.look.doctor.reading import Answers, Curve, RunRecord
from rolecall.maths.codes import Role

_ILLEGAL = ("bad_actions", "illegal_moves", "not_numbers", "tool_failures")
"""What environments count when an answer is no action."""


def no_tool_calls(run: RunRecord) -> Seen | None:
    """A tool that was called is called in less than a tenth of as many episodes."""
    calls = run.counted("agents/tool_calls")
    if len(calls) < 8 or calls.first < 0.1:
        return None
    steps = calls.lasting(lambda n: n < 0.1 * calls.first, least=3)
    if steps is None or steps[1] < calls.steps[-1]:
        return None
    said = f"tool calls fell from {calls.first:.2g} to {calls.last:.2g} an episode: the policy no longer uses its tools"
    return Seen("certain", steps, said, run.more_kl(), run.evidence(steps, Answers.best))


def illegal_actions(run: RunRecord) -> Seen | None:
    """Four turns in ten are not an action that the environment knows."""
    turns = run.curve("agents/turns")
    for name in _ILLEGAL:
        count = run.counted(f"agents/{name}")
        if not len(count):
            continue
        share = Curve(steps=count.steps, values=count.values / np.maximum(turns.values, 1e-9))
        steps = share.lasting(lambda s: s > 0.4)
        if steps is None:
            continue
        said = f"{share.mean(steps):.0%} of the turns are not a legal action ({name})"
        paid = run.number("algorithm.entropy_coef", 0.0) > 0
        setting = "--algorithm.entropy_coef 0" if paid else "--sampling.temperature 0.7"
        return Seen("certain", steps, said, setting, run.evidence(steps, lambda a: a.most(-a.column("score"))))
    return None


def turn_limit(run: RunRecord) -> Seen | None:
    """Half of the episodes end because of agent.max_turns."""
    cut = run.counted("agents/finish/max_turns")
    steps = cut.lasting(lambda share: share > 0.5) if len(cut) else None
    if steps is None:
        return None
    most = int(run.number("agent.max_turns", 16))
    said = f"{cut.mean(steps):.0%} of the episodes are cut off at {most} turns, before the environment ends them"
    shown = run.evidence(steps, lambda answers: answers.most(np.where(answers.cut_off(), 1.0, np.nan)))
    return Seen("certain", steps, said, f"--agent.max_turns {2 * most}", shown)


def epsilon_stuck(run: RunRecord) -> Seen | None:
    """At this pace half of the choices will still be random at the last step."""
    epsilon, played = run.curve("epsilon"), run.curve("env_steps")
    if len(epsilon) < 5 or len(played) != len(epsilon):
        return None
    begin, end = run.number("q.epsilon_start", 1.0), run.number("q.epsilon_end", 0.05)
    whole = played.values[-1] / max(1, played.steps[-1]) * max(1.0, run.number("steps", played.steps[-1]))
    at_the_end = begin + min(1.0, whole / max(1.0, run.number("q.epsilon_steps", 1.0))) * (end - begin)
    if max(float(epsilon.values[-1]), 0.5) > epsilon.values[-1] or not at_the_end > 0.5:
        return None
    said = (
        f"{epsilon.values[-1]:.0%} of the choices are random, and at the last step {at_the_end:.0%} will be: agents never "
        "play what they learn"
    )
    setting = f"--q.epsilon_steps {max(1, int(whole / 3))}" if end <= 0.5 else "--q.epsilon_end 0.05"
    return Seen("certain", (epsilon.steps[0], epsilon.steps[-1]), said, setting)


def stale_target(run: RunRecord) -> Seen | None:
    """The target networks have moved by less than a tenth, or not at all."""
    taken = run.curve("optimizer_steps")
    if run.option("algo") not in ("iql", "vdn", "qmix") or len(taken) < 10:
        return None
    done, every = max(0.0, float(taken.values.sum())), run.number("q.target_every", 200)
    tau = None if run.option("q.tau") is None else min(max(run.number("q.tau", 1.0), 0.0), 1.0)
    moved = 1 - (1 - tau) ** done if tau is not None else float(done >= every)
    if moved >= 0.1:
        return None
    how = f"after {done:.0f} optimiser steps, copies are made every {every:g}" if tau is None else f"q.tau is {tau:g}"
    said = f"the target networks are still {f'{1 - moved:.0%} ' if moved else ''}those of the start: {how}"
    return Seen("certain", (taken.steps[0], taken.steps[-1]), said, "--q.tau 0.01")


def idle_agent(run: RunRecord) -> Seen | None:
    """One agent does the same at 95 % of its choices and more, while another one does several things."""
    if run.files.command != "marl":
        return None
    recorded = [run.answers((step, step)) for step in list(run.files.rollouts)[-2:]]
    before, last = (recorded[0], recorded[1]) if len(recorded) == 2 else (None, None)
    if before is None or last is None:
        return None
    shares = _commonest(last)
    for agent, now in shares.items():
        others = [share for name, share in shares.items() if name != agent]
        if min(now, _commonest(before).get(agent, 0.0)) > 0.95 and others and min(others) < 0.85:
            rows = np.array([1.0 if name == agent else np.nan for name in last.table["agent"].to_pylist()])
            said = f"{agent} does the same at {now:.0%} of its choices while others act"
            setting = "--rewards team" if run.option("rewards") == "individual" else "--ppo.entropy_coef 0.05"
            return Seen("likely", (before.step, last.step), said, setting, last.most(rows))
    return None


def _commonest(answers: Answers) -> dict[str, float]:
    """By agent: the share of its commonest action among those that it chose."""
    chosen: dict[str, list[int]] = {}
    for agent, ids, roles in zip(
        answers.table["agent"].to_pylist(), answers.lists("ids"), answers.lists("roles"), strict=True
    ):
        if ids is not None and roles is not None:
            chosen.setdefault(agent, []).extend(ids[roles == Role.CONTENT].tolist())
    return {agent: max(map(acts.count, set(acts))) / len(acts) for agent, acts in chosen.items() if len(acts) >= 10}
