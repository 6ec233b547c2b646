"""What `rolecall diff` prints."""

import json
from dataclasses import asdict
from typing import Any

from rolecall.config.use import DiffOptions
from rolecall.files import plain
from rolecall.visible import visible_text, visible_token

_SHOWN = 30
"""Settings that are printed; all are in the JSON."""


def diff(options: DiffOptions) -> int:
    """What differs; 1 if runs part."""
    from rolecall.jobs.diff import diff

    found = diff(*options.runs, against=options.against)
    if options.json:
        print(json.dumps(plain({"same": found.same, **asdict(found)}), allow_nan=False))
        return int(not found.same)
    lines = [line for pair in found.pairs for line in (*_pair(pair, found.command), "")]
    lines += [line for sides in found.sides for line in (*_sides(sides), "")]
    print(visible_text("\n".join(lines[:-1])))
    return int(not found.same)


def _pair(pair: Any, command: str) -> list[str]:
    followed = pair.followed
    lines = [f"A {pair.runs[0]}", f"B {pair.runs[1]}"]
    lines += _changed("settings", pair.settings) + _changed("versions and machine", pair.versions)
    lines.append(f"weights at start: {_known(followed.weights)}")
    many = "s" if followed.records != 1 else ""
    records = f" in {followed.records} recorded step{many}" if followed.order is not None else ""
    lines.append(f"data order: {_known(followed.order)}{records}")
    parting = followed.parting
    if parting is None:
        return [*lines, f"the same in all {followed.steps} steps that both have"]
    place = f"step {parting.step}"
    place += "" if parting.answer is None else f", answer {parting.answer}"
    place += "" if parting.token is None else f", token {parting.token}"
    lines.append(f"they part at {place}: {parting.kind}")
    lines.append(f"  {parting.sentence}")
    if not parting.recorded:
        said = "nothing is recorded of the answers of that step in both runs, so only its numbers are compared"
        lines.append(f"  {said}{'; --save.rollouts keeps more steps' if command == 'rl' else ''}")
    lines.append(f"  {pair.cause}")
    return lines


def _changed(what: str, changed: Any) -> list[str]:
    if not changed:
        return [f"{what}: the same"]
    lines = [f"{what}: {len(changed)} differ{'s' if len(changed) == 1 else ''}"]
    lines += [f"  {one.name}: {_value(one.values[0])} and {_value(one.values[1])}" for one in changed[:_SHOWN]]
    return [*lines, *([f"  and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else [])]


def _sides(sides: Any) -> list[str]:
    lines = [f"{'':28} {'A':>10} {'B':>10} {'B - A':>10}   95 % interval"]
    for one in sides.metrics:
        if one.main:
            low, high = one.interval
            mark = "" if one.more_than_noise else "  noise"
            shown = (
                f"{one.means[0]:10.4g} {one.means[1]:10.4g} {one.difference:+10.3g}   {low:+.3g} to {high:+.3g}{mark}"
            )
            lines.append(f"{one.name:28} {shown}")
    return [*lines, sides.sentence]


def _known(same: bool | None) -> str:
    return "not recorded" if same is None else "the same" if same else "not the same"


def _value(value: Any) -> str:
    shown = visible_token(value)[1:-1] if isinstance(value, str) else json.dumps(value)
    return shown if len(shown) <= 60 else f"{shown[:59]}…"
