"""The error whose message is meant for the person at the keyboard."""


class UserError(ValueError):
    """Something the user can put right, in one sentence: what, where, what to do. The command line shows it bare."""

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        """`exit_code` is 2 for what is wrong with the call, found before any work; 1 for what comes later."""
        super().__init__(message)
        self.exit_code = exit_code
