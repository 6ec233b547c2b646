"""What `rolecall view` prints."""

from rolecall.config.view import ViewOptions
from rolecall.visible import visible_text


def view(options: ViewOptions) -> None:
    """The address to open; Ctrl-C ends it."""
    from rolecall.jobs.view import view

    def ready(address: str) -> None:
        print(f"the runs in {visible_text(options.dir)}: {address}\nCtrl-C ends it", flush=True)

    view(options.dir, port=options.port, ready=ready)
