"""A run to look at, made once."""

import pytest
from look_runs import real_run


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A real run of three steps. Tests that change it take a copy."""
    return real_run(tmp_path_factory.mktemp("runs") / "looked-at")
