"""Reading YAML (and so JSON) as people expect it to read."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from rolecall.errors import UserError


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain scalars: `1e-5` is a number, `off` and `no` are text, `12:30` is no number of seconds."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (a class attribute of the base, typed so)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key `{key}` appears twice", key_node.start_mark)
            if isinstance(key, Hashable):
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that either version of YAML would read as something else, and escapes line breaks."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)

_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
}
for _tag, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)))  # SafeLoader would read 010 as 8


_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML or JSON file."""
    path = Path(path).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"config {str(path)!r} is not a text file in UTF-8; give a YAML or JSON file") from error
    except OSError as error:
        raise UserError(f"config {str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:  # a NUL in the name
        raise UserError(f"config {str(path)!r} cannot be read: {error}") from error
    settings = _parse(text, where=f"config {str(path)!r}")
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise UserError(f"config {str(path)!r} holds a {type(settings).__name__}; write settings as `key: value` lines")
    return settings


def read_value(text: str, *, where: str) -> Any:
    """One value from the command line, where the option does not say what type it has."""
    return _parse(text, where=where)


def write_value(value: Any) -> str:
    """A value on one line, for `read_value`."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _parse(text: str, *, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError as error:
        raise UserError(f"{where} is nested too deeply") from error
    except ValueError as error:  # a tagged scalar that does not hold what its tag says
        raise UserError(f"{where} is not valid YAML: {error}") from error
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{where} is not valid YAML{line}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error
