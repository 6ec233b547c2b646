"""`rolecall push` on the terminal."""

from rolecall.config.push import PushOptions
from rolecall.jobs.push import run as push


def run(options: PushOptions) -> None:
    """Write the folder, upload it, and say where both are."""
    made = push(options)
    size = sum(file.stat().st_size for file in made.folder.iterdir())
    print(f"folder: {made.folder} ({len(list(made.folder.iterdir())) - 1} files, {size / 1e6:,.1f} MB)")
    print(f"model: {made.url}" if made.url else "nothing was uploaded; leave out --dry-run to do it")
