"""The pytest plugin: every function of the interface is a fixture that gives the adapter's.

Not loaded by itself, so that it costs other people's tests nothing:

    pytest -p rolecall.conformance.plugin --conformance-adapter my_adapter.py --pyargs rolecall.conformance.cases
"""

from collections.abc import Callable
from typing import Any

import pytest

from rolecall.conformance.load import NAMES, Adapter, accepts, load, signature
from rolecall.errors import UserError

_LOADED = pytest.StashKey[Adapter]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """One option."""
    text = "a Python file with functions of a library, or one of rolecall, trl, verl, openrlhf"
    parser.addoption("--conformance-adapter", metavar="FILE", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """A wrong adapter is said once, before anything runs."""
    name = config.getoption("--conformance-adapter")
    if name is not None:
        try:
            config.stash[_LOADED] = load(name)
        except UserError as error:
            raise pytest.UsageError(str(error)) from error


def _fixture(name: str) -> Any:
    defaults = {p.name: p.default for p in signature(name).parameters.values()}

    def offered(request: pytest.FixtureRequest) -> Callable[..., Any]:
        adapter = request.config.stash.get(_LOADED, None)
        if adapter is None:
            raise pytest.UsageError("the conformance cases need --conformance-adapter FILE")
        if name not in adapter.functions:
            pytest.skip("not offered")
        function = adapter.functions[name]

        def call(*tensors: Any, **options: Any) -> Any:
            taken = {key: value for key, value in options.items() if accepts(function, key)}
            for key in options.keys() - taken.keys():
                if options[key] is not defaults[key]:
                    pytest.skip(f"{name} does not take {key}")
            try:
                return function(*tensors, **taken)
            except NotImplementedError as error:
                pytest.skip(str(error) or "not offered")

        return call

    return pytest.fixture(name=name)(offered)


for _name in NAMES:
    globals()[f"fixture_{_name}"] = _fixture(_name)
