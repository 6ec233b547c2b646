import pytest
from audit_setups import train_chat_model, with_tokenizer

from rolecall.policy.tiny import tiny_tokenizer


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """A chat model like SmolLM2 that adds digits, rightly now and then."""
    return str(train_chat_model(tmp_path_factory.mktemp("audit")))


@pytest.fixture(scope="session")
def tiny_model(chat_model, tmp_path_factory):
    """The same weights with the built-in model's tokenizer."""
    return with_tokenizer(chat_model, tmp_path_factory.mktemp("audit") / "tiny", tiny_tokenizer())
