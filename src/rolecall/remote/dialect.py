"""What a server must do to sample for a run, whatever its endpoints are called. A dialect is these few functions for one kind of
server; `remote.ours` is that of `rolecall serve`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rolecall.errors import UserError
from rolecall.types import Completion, Request, Sampling


class ServerLostError(Exception):
    """Out of reach, too slow, cut off or failed: the same may succeed later, or at another server."""


class ServerRefusedError(Exception):
    """The server understood and said no, in its own words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def lacks(path: str, start: str) -> UserError:
    """A server without an endpoint that training needs; `start` says how to start one that has it."""
    return UserError(
        f"it has no {path}, which weights and tokens need; {start}, see docs/servers.md; as it is, `rolecall eval --model URL/v1` works, "
        "and so do judges and players"
    )


def one_version(versions: Sequence[int]) -> int:
    """The version of an answer, given those of its spans. Weights that changed inside an answer belong to somebody else's run."""
    if len(set(versions)) > 1:
        raise ValueError(f"versions {sorted(set(versions))} of the weights in one answer")
    return versions[0]


class Call(Protocol):
    """Sends one request to one server and waits for its answer."""

    async def __call__(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | Path | None = None,
        *,
        query: Mapping[str, str] | None = None,
        seconds: float | None = None,
        read: bool = True,
    ) -> Any:
        """The JSON of the answer, None if it is empty or not to be `read`. A mapping is sent as JSON, a path as the bytes of that file. Raises
        `ServerLostError` after `seconds` too, and `ServerRefusedError` for a status from 400 to 499."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What a server says of itself; None where its kind does not say."""

    software: str
    """Such as `rolecall 0.2.0`."""
    engine: str
    """What samples there, such as native or vllm: numbers of one kind are alike."""
    model: str
    dtype: str
    """That it computes in, such as float32."""
    context_length: int
    vocabulary: int | None = None
    tokenizer: str | None = None
    """A fingerprint of its tokenizer's vocabulary."""
    policy_version: int | None = None
    hash: str | None = None
    """`weights_hash` of the weights it samples from, in its dtype."""
    processes: int = 1
    """That take part in a broadcast of weights."""
    cuda: bool = False
    """Whether its weights are on GPUs."""
    versions: int = 1
    """Versions of an adapter that it can hold side by side, each over the same weights."""
    highest_rank: int | None = None
    """Of an adapter that stands beside others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """Weights that wait for servers to load them."""

    directory: Path
    """Holds `file` and a manifest with its sha256, if the weights are not broadcast."""
    file: Path
    """All tensors by their names as one safetensors file."""
    version: int
    hash: str
    """`weights_hash` of them: of whole weights in the servers' dtype, else in float32."""
    shared: bool
    """True: servers see the directory. False: the file has to be sent."""
    tensors: Mapping[str, Tensor] | None = None
    """The same tensors, where they are broadcast."""
    base: "Published | None" = None
    """The weights to which these are an adapter; None: they are whole, by their Hugging Face names, in the servers' dtype."""
    keep: bool = False
    """The server keeps them aside, under their hash as a name, and merges adapters into them. In the trainer's dtype."""
    broadcast: Mapping[str, Any] | None = None
    """Where the server finds the broadcast, while there is one."""

    @property
    def names(self) -> dict[str, str]:
        """What a server is told of weights that are kept, or belong to such."""
        return ({"base": self.base.hash} if self.base else {}) | ({"keep": self.hash} if self.keep else {})


class Dialect(Protocol):
    """How one kind of server is spoken to. It holds no state: `call` says which server it is."""

    name: str
    at_once: int
    """Units of requests that a server is given at a time."""
    unit_prompts: int | None
    """Prompts of a unit, which is sent, answered and, when a server is lost, sent again as a whole; None: what a flight
    holds is shared out evenly."""

    uploads: bool
    """Whether weights can be sent to a server that does not see their directory."""
    sign_of_life: str = "/health"
    """What a server is asked, by GET, to see that it lives while it does something that takes long."""
    merges: bool = False
    """Whether it keeps weights aside, takes an adapter alone and merges it, and takes part in a broadcast."""

    async def recognises(self, call: Call) -> bool:
        """Whether the server speaks this dialect."""
        ...

    def beside(self, slot: int) -> "Dialect":
        """The same for one of several versions that one server holds side by side (`About.versions`). It may belong to that
        server alone."""
        return self

    async def about(self, call: Call) -> About:
        """What it says of itself. A `UserError` if it lacks an endpoint that the methods below need."""
        ...

    def unable(self, sampling: Sampling) -> str | None:
        """What of these settings it cannot do, or cannot record exactly, as the end of a sentence; None: nothing."""
        ...

    async def generate(self, call: Call, requests: Sequence[Request], *, seconds: float | None) -> list[Completion]:
        """All answers, in the order of the requests and of their samples, with the log-probs of the distribution that was
        drawn from. What has not ended after `seconds` ends as it is, with `Finish.TIMEOUT`. A hang-up cancels them."""
        ...

    async def score(self, call: Call, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p of every token but the first of each, at temperature 1 over the whole vocabulary, by the weights that
        answers are drawn with. Works while the server is paused."""
        ...

    async def pause(self, call: Call) -> None:
        """Take on nothing new; return when nothing is in flight."""
        ...

    async def load(self, call: Call, published: Published) -> str | None:
        """Take the weights, forget what was cached under others, and say their version from now on. The hash of what was
        loaded, where the server gives one. A `ServerRefusedError` of status 409 if what an adapter belongs to is not there."""
        ...

    async def resume(self, call: Call) -> None:
        """Take on requests again."""
        ...

    async def leave(self, call: Call) -> None:
        """Give back what the server holds for `beside`, at the end of a run."""
        return
