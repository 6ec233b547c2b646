"""Shape checks for the whole suite: every annotation in `rolecall.maths` is enforced by jaxtyping and beartype."""

import gc
import logging
import os
import sys

gc.disable()  # until everything is imported
os.environ["HF_HUB_OFFLINE"] = "1"

from jaxtyping import install_import_hook

install_import_hook("rolecall.maths", "beartype.beartype")

import cloudpickle
import jaxtyping
import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")
torch.set_num_threads(1)


def pytest_collection_finish(session):
    gc.freeze()  # modules and collected tests stay: collections need not search them
    gc.enable()
    # What a worker process is sent of a test module must not make it import that module, and torch with it.
    for module in {item.module for item in session.items}:
        cloudpickle.register_pickle_by_value(module)


@pytest.fixture(autouse=True)
def own_log_level():
    """What an earlier test, or a command it ran, has set does not hide messages from this one."""
    logging.getLogger("rolecall").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def own_precision():
    """Accelerate keeps a run's precision for the whole process: the next test has none."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None and state.AcceleratorState._shared_state.get("_mixed_precision", "no") != "no":
        state.AcceleratorState._reset_state()


@pytest.fixture
def users_view():
    """Shape checks off, so that a wrong call meets the sentence a user would read."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def fast_paths(monkeypatch):
    """On, whatever the environment says: for tests that are about them."""
    monkeypatch.delenv("ROLECALL_FLAT", raising=False)
    monkeypatch.delenv("ROLECALL_KERNELS", raising=False)
