"""Help for the terminal: a line or two for each option, grouped by section."""

import json
import textwrap
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from rolecall.config.schema import REQUIRED, Option, Section, alternatives, nearest
from rolecall.errors import UserError

_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT"}
_COLUMN = 34


def help_text(command: str, section: Section, *, presets: tuple[str, ...], about: str = "", width: int = 100) -> str:
    """The options of a command, each with the first sentence about it; all sentences of one section or key if
    `about` names it."""
    if about:
        return "\n".join(_about(command, section, about.lstrip("-"), width))
    required = [_bare(o) if o.bare else f"--{o.flag} {metavar(o)}" for o in section.options() if o.default is REQUIRED]
    lines = [
        section.about,
        "",
        " ".join(["usage: rolecall", command, *required, *(["[--option value ...]"] * bool(section.parts))]),
    ]
    groups = list(section.sections())
    for group in groups:
        options = [part for part in group.parts if isinstance(part, Option)]
        if group.key:
            off = f" Off unless set; --{group.key} switches it on." if group.optional and not group.on else ""
            lines += ["", f"{group.key}: {_first_sentence(group.about)}{off}"]
        elif options:
            lines += ["", "options:"]
        for option in options:
            lines += _entry(_usage(option), _line_about(option), width)
    if section.parts:
        lines += ["", "for every command:"]
        lines += _entry("--config FILE", "Settings from a YAML or JSON file; flags are stronger.", width)
        if presets:
            lines += _entry(
                "--preset NAME", f"Settings by name; a file is stronger. One of: {', '.join(presets)}.", width
            )
        if not any(option.key == "dry_run" for option in section.options()):
            lines += _entry("--dry-run", "Check everything, show the resulting settings, and stop.", width)
        lines += _entry("--help [KEY]", "This list, or all about one key or section.", width)
    return "\n".join(lines)


def metavar(option: Option) -> str:
    """What stands for the option's value."""
    if option.mapping:
        return "YAML"
    return _metavar(option.many if option.many is not None else option.type)


def default_text(option: Option) -> str:
    """The default as the user would write it."""
    return _written(option.default)


def _metavar(hint: Any) -> str:
    words: list[str] = []
    for t in alternatives(hint):
        if get_origin(t) is Literal:
            words += [str(choice) for choice in get_args(t)]
        elif t in _METAVARS:
            words.append(_METAVARS[t])
        elif t is bool:
            words.append("true|false")
        elif t is not NoneType and get_origin(t) is None:
            words.append(getattr(t, "__name__", str(t)).upper())
    return "|".join(words)


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_written, value)) or "none"
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) and not value.strip() else str(value)


def _usage(option: Option) -> str:
    if option.bare:
        return _bare(option)
    if option.switch:
        return f"--[no-]{option.flag}"
    if option.mapping:
        return f"--{option.flag}.KEY VALUE"
    return f"--{option.flag} {metavar(option)}"


def _bare(option: Option) -> str:
    return option.flag.upper() if option.many is None else f"{option.flag.upper()} ..."


def _line_about(option: Option) -> str:
    end = "  (required)" if option.default is REQUIRED else ""
    if option.default not in (REQUIRED, None, (), {}):
        end = f"  [{default_text(option)}]"
    return _first_sentence(option.about) + end


def _entry(usage: str, about: str, width: int) -> Iterator[str]:
    lines = textwrap.wrap(about, max(30, width - _COLUMN)) or [""]
    if len(usage) + 4 > _COLUMN:
        yield f"  {usage}"
    else:
        yield f"  {usage:{_COLUMN - 2}}{lines.pop(0)}".rstrip()
    for line in lines:
        yield " " * _COLUMN + line


def _first_sentence(text: str) -> str:
    """Up to the first full stop, on one line; `.txt` and `e.g. x` do not end a sentence."""
    line = " ".join(text.split())
    for i, character in enumerate(line):
        if character == "." and line[i + 1 : i + 2] in ("", " ") and not line[: i + 1].endswith(("e.g.", "i.e.")):
            following = line[i + 2 : i + 3]
            if not following or following.isupper() or not following.isalpha():
                return line[: i + 1]
    return line


def _about(command: str, section: Section, name: str, width: int) -> Iterator[str]:
    name = name.replace("-", "_")
    options = [o for o in section.options() if name in (o.key, o.flag) or o.key.startswith(f"{name}.")]
    if not options:
        guess = nearest(name, section)
        end = f"did you mean {guess}?" if guess else f"rolecall {command} --help lists all."
        raise UserError(f"there is no option or section {name!r}: {end}")
    for option in options:
        yield _usage(option)
        for paragraph in option.about.split("\n\n"):
            yield textwrap.fill(" ".join(paragraph.split()), width, initial_indent="    ", subsequent_indent="    ")
        yield "    Required." if option.default is REQUIRED else f"    Default: {default_text(option)}"
