"""`rolecall push`: a run's model on the Hugging Face hub, with a card made from the run."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from rolecall.errors import UserError
from rolecall.files import DiskError, write_atomically
from rolecall.jobs.models import model_directory
from rolecall.jobs.report import report
from rolecall.look.card import SETTINGS, model_card, settings_yaml
from rolecall.look.run import RunFiles, check_directory, is_demo, read_object, read_run
from rolecall.train.exit_codes import ExitCode
from rolecall.train.manifest import MANIFEST

_PUSHED = ("sft", "rm", "rl", "dpo", "expert-iteration")
_MARK = "pushed from a rolecall run\n"
_OURS = ".rolecall-push"
"""Names a folder that this job wrote, and may write again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """What was written and uploaded."""

    folder: Path
    """The files, as they are on the hub."""
    url: str | None
    """Where they are; None after a dry run."""


def push(run: str | Path, repo: str, *, private: bool = True, out: str | None = None, dry_run: bool = False) -> Pushed:
    """Upload a run's model: `push("runs/rl-1", "me/my-model").url`. With `dry_run` only the folder is written."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    place = Path(run).expanduser()
    held = _checked(place)
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"{repo!r} is not a hub id, such as me/my-model: {error}") from error
    folder = place / "push" if out is None else Path(out).expanduser()
    try:
        _write(held, folder, repo)
    except (OSError, DiskError) as error:
        raise UserError(f"{folder} could not be written: {error}", exit_code=ExitCode.DISK) from error
    return Pushed(folder=folder, url=None if dry_run else _upload(folder, repo, private=private))


def _checked(place: Path) -> RunFiles:
    check_directory(place)
    if is_demo(place):
        raise UserError(f"{place} is a demo of several runs; push one of them, such as {place / 'grpo'}")
    held = read_run(place)
    if held.command not in _PUSHED:
        raise UserError(
            f"{place} is a run of {held.command}, which makes no language model; push one of {', '.join(_PUSHED)}"
        )
    if not (place / "model").is_dir():
        raise UserError(
            f"the run {place} has no final model yet: let it end, or resume it with rolecall {held.command} --out {place} "
            "--resume"
        )
    model_directory(str(place))  # refuses one that is damaged
    return held


def _write(held: RunFiles, folder: Path, repo: str) -> None:
    """Rebuild the folder. The weights are linked where the disk can, copied where it cannot."""
    if folder.exists():
        if not (folder / _OURS).is_file():
            raise UserError(f"{folder} is there already and was not written by push; give another folder with --out")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    write_atomically(folder / _OURS, _MARK.encode())
    for file in sorted((held.path / "model").iterdir()):
        if file.is_file() and file.name not in ("README.md", MANIFEST):
            _link(file, folder / file.name)
    report(held.path, out=folder / "report.html")
    write_atomically(folder / SETTINGS, settings_yaml(held).encode())
    write_atomically(folder / "README.md", model_card(held, repo=repo, base=_base(held)).encode())


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:
        shutil.copyfile(file, to)


def _base(held: RunFiles) -> str | None:
    """The model at the start of a chain of runs."""
    name = held.config.get("model")
    for _ in range(20):
        if not isinstance(name, str) or not (Path(name).expanduser() / "config.json").is_file():
            break
        if not (Path(name).expanduser() / "run.json").is_file():
            break
        name = read_object(Path(name).expanduser() / "config.json").get("model")
    return name if isinstance(name, str) else None


def _upload(folder: Path, repo: str, *, private: bool) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
    from huggingface_hub.errors import HTTPError as ClientError  # type: ignore[attr-defined]

    kept = f"the folder is kept in {folder}"
    api = HfApi()
    try:
        made = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id, folder_path=folder, commit_message="Upload from rolecall", ignore_patterns=[_OURS]
        )
    except (HfHubHTTPError, LocalTokenNotFoundError) as error:
        code = getattr(getattr(error, "response", None), "status_code", None)
        if code in (None, 401):
            raise UserError(
                f"you are not logged in to the hub: `hf auth login`, or set HF_TOKEN; {kept}", exit_code=ExitCode.ERROR
            ) from error
        why = " ".join(str(error).split())[:300]
        raise UserError(f"the hub refused {repo} ({why}); {kept}", exit_code=ExitCode.ERROR) from error
    except (ClientError, ConnectionError) as error:  # nobody answers
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the hub cannot be reached ({why}); {kept}", exit_code=ExitCode.RETRY) from error
    return str(made)
