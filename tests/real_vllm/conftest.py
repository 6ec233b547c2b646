import pytest
from vllm_server import KEY


@pytest.fixture(autouse=True)
def key(monkeypatch):
    """The key that servers of these tests want."""
    monkeypatch.setenv("ROLECALL_SERVER_KEY", KEY)
