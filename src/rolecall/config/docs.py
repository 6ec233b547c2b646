"""Writes docs/config.md from the options themselves: `python -m rolecall.config.docs [--check] [FILE]`."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import rolecall.config
from rolecall.config.help import default_text, metavar
from rolecall.config.schema import REQUIRED, Option, Section, schema

_INTRODUCTION = """\
# Options

Written by `python -m rolecall.config.docs`; the text comes from the dataclasses in `rolecall.config`.

Every option can be given in three places, the later ones stronger: a preset (`--preset NAME`, or `preset: NAME` in the
file), a YAML or JSON file (`--config FILE`), and flags.

| in a file | as a flag |
|---|---|
| `sampling: {temperature: 0.8}` or `sampling.temperature: 0.8` | `--sampling.temperature 0.8` or `--sampling.temperature=0.8` |
| `json: true`, `json: false` | `--json`, `--no-json` |
| `sampling: {top_k: null}` | `--sampling.top_k none` |
| `sampling: {stop_ids: [1, 2]}` | `--sampling.stop_ids 1,2`; `''` is the empty list |
| `prompts: [a, b]` | `--prompt a --prompt b`: a list of texts repeats the flag |
| `chat_template_kwargs: {enable_thinking: false}` | `--chat_template_kwargs.enable_thinking false` |

In flags `-` may stand for `_`. A key that does not exist is an error, never ignored. `--dry-run` shows the settings that
result, each with the place it comes from; what it prints can be saved and used as a file."""


def options_page() -> str:
    """The whole page: every dataclass in `rolecall.config` whose name ends in Options, by command."""
    lines = [_INTRODUCTION]
    found = commands()
    for name, options in found.items():
        section = schema(options)
        lines += ["", f"## rolecall {name}", "", section.about]
        if base := next((other for other, its in found.items() if its in options.__mro__[1:]), None):
            known = {(part.key, part.about) for part in schema(found[base]).parts}
            own = tuple(part for part in section.parts if (part.key, part.about) not in known)
            lines += ["", f"All keys and presets of [rolecall {base}](#rolecall-{base}), and"]
            lines += _table(replace(section, parts=own))
            continue
        for group in section.sections():
            lines += _table(group)
        lines += _presets(getattr(options, "presets", {}))
    return "\n".join(lines) + "\n"


def commands() -> dict[str, type]:
    """The dataclasses of `rolecall.config` that name a command of their own and have options, by that name."""
    found: dict[str, type] = {}
    for module in iter_modules(rolecall.config.__path__):
        for value in vars(import_module(f"rolecall.config.{module.name}")).values():
            if isinstance(value, type) and "command" in vars(value) and any(schema(value).options()):
                found[value.command] = value  # type: ignore[attr-defined]
    return dict(sorted(found.items()))


def _table(group: Section) -> Iterator[str]:
    options = [part for part in group.parts if isinstance(part, Option)]
    if group.key:
        yield from ("", f"### {group.key}", "", group.about)
    if options:
        yield from ("", "| key | value | default | |", "|---|---|---|---|")
    for option in options:
        value = "true|false" if option.switch else metavar(option)
        value = f"{value} …" if option.many is not None else value
        default = "required" if option.default is REQUIRED else f"`{default_text(option)}`"
        flag = f" (`--{option.flag}`)" if option.flag != option.key else ""
        about = " ".join(option.about.split())
        yield f"| `{option.key}`{flag} | {_cell(value)} | {_cell(default)} | {_cell(about)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _presets(presets: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    if presets:
        yield from ("", "### Presets", "", "| preset | settings |", "|---|---|")
    for name, settings in presets.items():
        yield f"| `{name}` | {', '.join(f'`{key}: {_cell(str(value))}`' for key, value in _flat(settings))} |"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def main(arguments: Sequence[str]) -> int:
    """Write the page, or with --check say whether it is current."""
    files = [word for word in arguments if not word.startswith("-")]
    path = Path(files[0] if files else "docs/config.md")
    if "--check" not in arguments:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(options_page(), encoding="utf-8")
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == options_page():
        return 0
    sys.stderr.write(f"{path} is not current; run `python -m rolecall.config.docs`\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
