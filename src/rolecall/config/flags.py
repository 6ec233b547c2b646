"""Reading the command line: `--a.b value`, `--a.b=value`, `--switch`, `--no-switch`, and `-` for `_` in names.

Any option of the dataclass is a flag. Values stay text until `merge` checks them against their types, except where the
text alone does not say what is meant: `none`, lists, and values in mappings whose keys are the user's own.

    --sampling.top_k none           the option's None
    --prompt a --prompt b           a list of texts: the flag once for each
    --sampling.stop_ids 1,2         a list of numbers: commas, or the flag once for each; '' is the empty list
    --chat_template_kwargs.x true   a key of a mapping, read as YAML
    runs/first me/repo              options of a command that may be written without their flags, in their order
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from rolecall.config.foreign import Foreign, lookup
from rolecall.config.schema import Option, Section, alternatives, nearest
from rolecall.errors import UserError

_WORDS = {"true": True, "false": False, "none": None}


@dataclass(kw_only=True)
class CommandLine:
    """What was written after a command."""

    given: dict[str, Any] = field(default_factory=dict)
    """The options, by dotted key."""
    config: str | None = None
    """--config: a file of settings."""
    preset: str | None = None
    """--preset: a named set of settings."""
    dry_run: bool = False
    """--dry-run: show what would be done."""
    help: str | None = None
    """--help: what it was asked about, empty for all; None if it was not asked."""


def parse(arguments: Iterable[str], section: Section) -> CommandLine:
    """Read the arguments of a command with these options. All that is wrong is told at once."""
    reader = _Reader(section, arguments)
    while reader.words:
        reader.read_one()
    if reader.problems and reader.line.help is None:
        raise UserError("\n".join(reader.problems))
    return reader.line


class _Reader:
    def __init__(self, section: Section, arguments: Iterable[str]) -> None:
        self.section = section
        self.words = deque(arguments)
        self.line = CommandLine()
        self.problems: list[str] = []
        self._options = {option.flag: option for option in section.options()}
        self._options |= {option.key: option for option in section.options()}
        self._bare = [option for option in section.options() if option.bare]
        self._switched = {s.key: s for s in section.sections() if s.optional}
        self._prefixed = {flag: (o, text) for o in section.options() for flag, text in o.prefixed.items()}

    def read_one(self) -> None:
        """Take one option, with its value, from the words."""
        word = self.words.popleft()
        if word in ("-h", "--help"):
            self.line.help = self._value_after() or ""
        elif not word.startswith("--") or word == "--":
            self._stray(word)
        else:
            written, equals, text = word[2:].partition("=")
            self._read_named(written, text if equals else None)

    def _read_named(self, written: str, text: str | None) -> None:
        name = written.replace("-", "_")
        positive = name.removeprefix("no_")
        if name in self._options:
            self._set(self._options[name], f"--{written}", text)
        elif name in self._prefixed:
            named, prefix = self._prefixed[name]
            if (text := self._needed(written, text)) is not None:
                self.line.given[named.key] = f"{prefix}{text}"
        elif name in self._switched:
            text = text if text is not None else self._word_after()
            self.line.given[name] = None if text in ("none", "false") else {}
        elif name != positive and positive in self._switched:
            self.line.given[positive] = None
        elif name != positive and positive in self._options and self._options[positive].switch:
            if text is not None:
                self.problems.append(f"--{written} takes no value, got {text!r}")
            self.line.given[self._options[positive].key] = False
        elif name in ("config", "preset"):
            text = text if text is not None else self._value_after()
            if not text:
                self.problems.append(f"--{written} needs a {'file' if name == 'config' else 'name'}")
            setattr(self.line, name, text)
        elif name == "dry_run" and text is None:
            self.line.dry_run = True
        elif (entry := self.section.foreign.get(lookup(name))) is not None:
            self._set_foreign(entry, written, text)
        elif name != positive and (entry := self.section.foreign.get(lookup(positive))) is not None:
            self.line.given[entry.name] = False
        elif option := self._mapping_of(written):
            key = written[len(option.flag) + 1 :]
            if (text := self._needed(written, text)) is not None:
                before = self.line.given.get(option.key)
                added = {key: _yaml(text, f"--{written}")}
                self.line.given[option.key] = {**before, **added} if isinstance(before, dict) else added
        else:
            self._unknown(written, text)

    def _set(self, option: Option, flag: str, text: str | None, key: str | None = None) -> None:
        """Read the option's value; `key` is what it is given as, if not the option's own."""
        given, key = self.line.given, key or option.key
        if option.switch:
            text = text if text is not None else self._word_after()
            given[key] = True if text is None else _WORDS.get(text.lower(), text)
            return
        if (text := self._needed(flag[2:], text)) is None:
            return
        if option.optional and text.lower() == "none":
            given[key] = None
        elif option.many is not None:
            given[key] = [*(given.get(key) or []), *_elements(option.many, text)]
            while option.words and (more := self._value_after()) is not None:
                given[key] += _elements(option.many, more)
        elif option.mapping:
            given[key] = _yaml(text, flag)
        else:
            given[key] = _value(option.type, text)

    def _set_foreign(self, entry: Foreign, written: str, text: str | None) -> None:
        """A setting under another library's name: read as ours if it is the same, else as YAML."""
        if entry.same:
            self._set(self._options[entry.keys[0]], f"--{written}", text, entry.name)
            return
        text = text if text is not None else self._value_after()
        self.line.given[entry.name] = True if text is None else _yaml(text, f"--{written}")

    def _needed(self, written: str, text: str | None) -> str | None:
        text = text if text is not None else self._value_after()
        if text is None:
            self.problems.append(f"--{written} needs a value; one that begins with dashes is written --{written}=VALUE")
        return text

    def _value_after(self) -> str | None:
        """The next word if it is not an option. A negative number is none."""
        return self.words.popleft() if self.words and not self.words[0].startswith("--") else None

    def _word_after(self) -> str | None:
        return self.words.popleft() if self.words and self.words[0].lower() in _WORDS else None

    def _mapping_of(self, written: str) -> Option | None:
        """The option whose user-named key this is."""
        for flag, option in self._options.items():
            if option.mapping and written.replace("-", "_").startswith(f"{flag}.") and len(written) > len(flag) + 1:
                return option
        return None

    def _unknown(self, written: str, text: str | None) -> None:
        if text is None:
            self._value_after()  # its value, most likely
        if within := [f"--{flag}" for flag in self._options if flag.startswith(f"{written.replace('-', '_')}.")]:
            more = " …" if len(within) > 4 else ""
            self.problems.append(f"--{written} is a section: set {', '.join(within[:4])}{more}")
            return
        own = get_close_matches(written, ["config", "preset", "dry-run", "help"], n=1, cutoff=0.7)
        guess = nearest(written, self.section, flags=True) or next(iter(own), None)
        end = f": did you mean --{guess}?" if guess else "; --help lists all options"
        self.problems.append(f"unknown option --{written}{end}")

    def _stray(self, word: str) -> None:
        key = word.partition("=")[0]
        given = self.line.given
        bare = next((option for option in self._bare if option.many is not None or option.key not in given), None)
        if "=" in word and (key in self._options or nearest(key.lstrip("+"), self.section)):
            self.problems.append(f"unexpected {word!r}: write it as --{word}")
        elif bare is not None and not word.startswith("-"):
            given[bare.key] = word if bare.many is None else [*given.get(bare.key, []), word]
        elif word.startswith("-") and word.lstrip("-").replace("-", "_") in self._options:
            self.problems.append(f"unexpected {word!r}: write it as -{word}")
        else:
            self.problems.append(f"unexpected {word!r}: an option is written --name value, a list by repeating --name")


def _yaml(text: str, where: str) -> Any:
    from rolecall.config.files import read_value  # most command lines need no YAML

    return read_value(text, where=where)


def _elements(hint: Any, text: str) -> list[Any]:
    if str in alternatives(hint):
        return [text]
    return [_value(hint, part.strip()) for part in text.split(",")] if text else []


def _value(hint: Any, text: str) -> Any:
    """The text, or the choice that is written so where choices are not texts."""
    choices = [c for t in alternatives(hint) if get_origin(t) is Literal for c in get_args(t)]
    return next((choice for choice in choices if str(choice) == text), text)
