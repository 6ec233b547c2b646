"""A run to look at, made once, its page, and a browser."""

import pytest
from look_browser import browsers
from look_runs import real_run

import rolecall


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A real run of three steps. Tests that change it take a copy."""
    return real_run(tmp_path_factory.mktemp("runs") / "looked-at")


@pytest.fixture(scope="module")
def browser():
    yield from browsers()


@pytest.fixture(scope="module")
def page(run):
    return rolecall.report(run).path
