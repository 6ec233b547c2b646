"""Resolved options as YAML that can be read again, with the source of each value beside it."""

from collections.abc import Iterator, Mapping
from typing import Any

from rolecall.config.files import write_value
from rolecall.config.merge import Resolved, to_dict


def resolved_yaml(resolved: Resolved[Any]) -> str:
    """All settings, a line each; a comment says who set it, none that it is the default."""
    return "\n".join(_lines(to_dict(resolved.options), "", resolved.sources, 0)) + "\n"


def _lines(settings: Mapping[str, Any], prefix: str, sources: Mapping[str, str], depth: int) -> Iterator[str]:
    for name, value in settings.items():
        key = f"{prefix}{name}"
        inside = any(source.startswith(f"{key}.") for source in sources) or key not in sources
        if isinstance(value, Mapping) and value and inside:
            yield f"{'  ' * depth}{name}:"
            yield from _lines(value, f"{key}.", sources, depth + 1)
            continue
        line = f"{'  ' * depth}{name}: {write_value(value)}"
        yield f"{line:<50}  # {sources[key]}" if key in sources else line
