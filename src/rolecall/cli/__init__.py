"""The command line: thin, and quick to answer. What a command needs is imported only when it runs.

Exit codes: 0 done · 1 error · 2 the call is wrong · 3 diverged · 74 disk · 75 try again · 130 Ctrl-C · 143 SIGTERM
"""

import gc
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TextIO

import rolecall
from rolecall.cli.commands import COMMANDS, Command, imported
from rolecall.cli.watched import watched
from rolecall.errors import UserError

_ERROR, _USAGE, _INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None, *, own_process: bool = False) -> int:
    """Run `rolecall` with these arguments and return its exit code; without arguments, those of the process."""
    if argv is None:
        return watched(lambda: main(sys.argv[1:], own_process=True))
    # Threads that spin while they wait make a busy machine many times slower; read when torch is loaded, later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # torch writes C++ frames when a peer is lost; a sentence of ours says it
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    words = list(argv)
    with _Ending(own_process=own_process) as ending:
        if not words or words[0] in ("-h", "--help", "help"):
            print(_overview())
        elif words[0] in ("-V", "--version"):
            print(f"rolecall {rolecall.__version__}")
        else:
            command = ending.command = _command(words[0])
            options = _options(command, words[1:])
            if options is not None:
                run = imported(command.run)
                gc.freeze()  # modules stay: collections need not search them
                if command.trains:
                    from rolecall.cli.train import display, finish

                    result = finish(run(options, progress=display(quiet=options.quiet)), options)
                else:
                    result = run(options)
                ending.code = int(result) if isinstance(result, int) and not isinstance(result, bool) else 0
        sys.stdout.flush()
    return ending.code


class _Ending:
    """How a command ends: an error becomes a sentence on stderr and an exit code."""

    def __init__(self, *, own_process: bool) -> None:
        self.code, self._own_process = 0, own_process
        self.command: Command | None = None

    def __enter__(self) -> "_Ending":
        _make_printable(sys.stdout)
        _make_printable(sys.stderr)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is None:
            return False
        if isinstance(error, UserError):
            for line in str(error).splitlines():
                self._say(line)
            self.code = error.exit_code
        elif isinstance(error, KeyboardInterrupt):
            self._say("interrupted")
            self.code = _INTERRUPTED
        elif isinstance(error, BrokenPipeError):  # who read our output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.code = _ERROR
        elif not isinstance(error, Exception):
            return False
        elif (why := _system_refused(error)) is not None:
            self._say(why)
            self.code = _ERROR
            if self._own_process:  # libraries that were refused memory may crash as they are unloaded
                sys.stdout.flush()
                os._exit(_ERROR)
        else:
            traceback.print_exception(error)
            self._say("this is a bug; please report it with the lines above and what `rolecall env` prints")
            self.code = _ERROR
        return True

    def _say(self, sentence: str) -> None:
        named = f" {self.command.name}" if self.command else ""
        print(f"rolecall{named}: {sentence}", file=sys.stderr, flush=True)


def _system_refused(error: Exception) -> str | None:
    """A sentence for what the machine does not give; None if the error is about something else."""
    text = str(error)
    signs = ("allocate memory", "failed to map segment", "can't start new thread")
    if isinstance(error, MemoryError) or any(sign in text for sign in signs):
        return "out of memory; give the process more, or choose a smaller model, batch or context"
    if isinstance(error, RuntimeError) and "home directory" in text:
        return f"user {os.geteuid()} has no home directory, so a path cannot begin with ~; write it out, or set HOME"
    return None


def _options(command: Command, words: Sequence[str]) -> Any:
    """What the words ask for; None if that was --help or --dry-run, which are answered here."""
    from rolecall.config.flags import parse
    from rolecall.config.preflight import check_address_space, check_paths
    from rolecall.config.resume import rewritten
    from rolecall.config.schema import schema

    options = imported(command.options)
    line = parse(rewritten(words), schema(options))
    presets = getattr(options, "presets", {})
    if line.help is not None:
        from rolecall.config.help import help_text

        width = min(120, shutil.get_terminal_size((100, 24)).columns)
        print(help_text(command.name, schema(options), presets=tuple(presets), about=line.help, width=width))
        return None
    resolved = _resolve(options, presets, line)
    if line.dry_run:
        from rolecall.config.show import resolved_yaml

        print(resolved_yaml(resolved), end="")
        if hasattr(options, "plan"):
            print(f"\n{resolved.options.plan()}")
        return None
    check_paths(resolved.options)
    if not command.light:
        check_address_space()
    return resolved.options


def _resolve(options: type, presets: Any, line: Any) -> Any:
    """Preset < file < flags; under them, for a run that is resumed, its own settings. A file may name its preset."""
    from rolecall.config.files import read_settings
    from rolecall.config.merge import FLAGS, SAVED, preset_layer, resolve
    from rolecall.config.resume import saved_settings

    settings = read_settings(line.config) if line.config is not None else {}
    named = settings.pop("preset", None) if presets else None
    name = line.preset if line.preset is not None else named if named is None else str(named)
    layers: list[tuple[str, Any]] = []
    if line.given.get("resume"):
        layers.append((SAVED, saved_settings(line.given.get("out"))))
    if name is not None:
        layers.append(preset_layer(options, name))
    if line.config is not None:
        layers.append((Path(line.config).name, settings))
    return resolve(options, [*layers, (FLAGS, line.given)])


def _command(word: str) -> Command:
    for command in COMMANDS:
        if command.name == word:
            return command
    what = "option" if word.startswith("-") else "command"
    names = [command.name for command in COMMANDS] if what == "command" else []
    close = get_close_matches(word, names, n=1, cutoff=0.5)
    end = f": did you mean `rolecall {close[0]}`?" if close else "; `rolecall --help` lists the commands"
    raise UserError(f"unknown {what} {word!r}{end}")


def _overview() -> str:
    width = max(len(command.name) for command in COMMANDS)
    return "\n".join(
        [
            rolecall.__doc__ or "",
            "",
            "usage: rolecall COMMAND [--option value ...]",
            "",
            *(f"  {command.name:{width}}  {command.about}" for command in COMMANDS),
            "",
            "`rolecall COMMAND --help` lists its options; `rolecall --version` says which version this is.",
        ]
    )


def _make_printable(stream: TextIO) -> None:
    """A character that the terminal's encoding lacks is escaped rather than an error."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
