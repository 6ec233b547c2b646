"""Options of the commands that use models and runs instead of training."""

import os
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rolecall.config.agents import AGENT_FLAG, AgentOptions
from rolecall.config.parts import ChatOptions, EngineOptions, LoadOptions
from rolecall.config.rewards import RewardProcessOptions
from rolecall.config.sampling import Sampling
from rolecall.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ModelUseOptions:
    """What every command says that samples from a model."""

    model: str
    """`tiny`, a model directory, a .gguf file, a Hugging Face hub id, or a run's directory."""
    sampling: Sampling = field(default_factory=Sampling)
    """How to draw tokens."""
    policy: LoadOptions = field(default_factory=LoadOptions)


@dataclass(frozen=True, kw_only=True)
class ServedUseOptions(ModelUseOptions):
    """What commands say that can use a model behind an address too."""

    model: str
    """`tiny`, a model directory, a .gguf file, a Hugging Face hub id, a run's directory, or the address of an
    OpenAI-compatible API, such as http://127.0.0.1:8750/v1 (docs/servers.md)."""
    served_model: str | None = None
    """With an address: which of its models; the only one if not given."""

    @property
    def behind_api(self) -> bool:
        """Whether the model is somebody else's, and text is all that comes from it."""
        return self.model.startswith(("http://", "https://"))

    def check_api(self, **needs: bool) -> None:
        """Refuse what needs a model's tokens or weights, of which `needs` says whether it was given."""
        if not self.behind_api and self.served_model is not None:
            raise ValueError("served_model is one of an API: give its address as model")
        needs |= {"policy": self.policy != LoadOptions(), "sampling.stop_ids": self.sampling.stop_ids is not None}
        for name, given in needs.items() if self.behind_api else ():
            if given:
                raise ValueError(f"{name} needs the model itself, and {self.model} gives text only: leave it out")


@dataclass(frozen=True, kw_only=True)
class EvalOptions(RewardProcessOptions, ServedUseOptions):
    """How good a model is on held-out rows: accuracy, avg@k, pass@k, length, truncation, KL to another model."""

    command: ClassVar[str] = "eval"
    rows: str | None = None
    """Prompts: a file, a saved dataset, or a task (its test split). If not given, or if they are those the run in `model` learned from, the ones it held out."""
    env: str | None = field(default=None, metadata=AGENT_FLAG)
    """Play episodes of several turns in it, as in `rolecall rl`. If neither it nor rows are given, that of the run."""
    agent: AgentOptions = field(default_factory=AgentOptions)
    reward: tuple[str, ...] = ()
    """Reward functions, or a reward model's run. If not given: the task's own, or that of the run in `model`."""
    n: int = 256
    """How many rows at most."""
    samples: int = 1
    """Answers per row for avg@k and pass@k; 1 is greedy only."""
    against: str | None = None
    """A model to measure the KL to, on the sampled answers (needs samples above 1)."""
    template: bool | None = None
    """Put prompts that are plain text into the chat template. Left out: if the run in `model` was trained on messages."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    """Left out: those of the run in `model`."""
    engine: EngineOptions = field(default_factory=EngineOptions)
    show: int = 0
    """How many rows to print with their greedy answers."""
    json: bool = False
    """Print the numbers as one JSON object."""
    seed: int = 0
    """Seeds the sampled answers."""

    def __post_init__(self) -> None:
        if self.n < 1 or self.samples < 1:
            raise ValueError(f"n and samples must be at least 1, got {self.n} and {self.samples}")
        if self.against is not None and self.samples < 2:
            raise ValueError("the KL to another model is measured on sampled answers: give samples above 1")
        engine = self.engine != EngineOptions()
        self.check_api(env=self.env is not None, against=self.against is not None, engine=engine)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ServedUseOptions):
    """Answers from a model, whole or token by token, or as demonstrations for `rolecall sft`."""

    command: ClassVar[str] = "generate"
    prompts: tuple[str | list[dict[str, Any]], ...] = field(default=(), metadata={"flag": "prompt"})
    """What to answer; repeat the flag for several. In a file or from Python a prompt may be a list of messages."""
    prompts_file: str | None = None
    """More prompts: a .txt file with one in each line, or a .jsonl file whose rows have `prompt` or `messages`,
    and `tools` if they bring any."""
    rows: str | None = None
    """More prompts: a file of rows, a dataset or a task, as for `rolecall rl`."""
    count: int = 256
    """How many of the rows at most."""
    out: str | None = None
    """Write the answers to this .jsonl file instead of printing them: the rows with a `completion`, as `rolecall sft` takes them.
    Answers that were cut off or are empty are left out."""
    n: int = field(default=1, metadata={"known_as": ("num_generations", "num_return_sequences", "num_samples")})
    """Answers to each prompt."""
    seed: int = 0
    """The same seed draws the same answers."""
    chat: bool | None = None
    """Put prompts into the model's chat template. Left out: if the run in `model` was trained on messages; of a model that
    no run made, if it has a template."""
    system: str | None = field(default=None, metadata={"known_as": ("system_prompt",)})
    """A system message before each prompt. Left out: that of the run in `model`."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """What else to tell the chat template, such as `enable_thinking`."""
    engine: Literal["auto", "native", "hf"] = "auto"
    """What samples. native: quick, for Llama-family models. hf: any architecture. auto: native where it can."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The numbers to compute in."""
    show: Literal["text", "tokens"] = "text"
    """text: the answers. tokens: every token with its role and log-prob."""
    json: bool = False
    """Print one JSON object for each answer, with ids and log-probs."""

    def __post_init__(self) -> None:
        if not self.prompts and self.prompts_file is None and self.rows is None:
            raise ValueError("there is nothing to answer: give --prompt TEXT, --prompts_file FILE or --rows ROWS")
        for name, value in (("n", self.n), ("count", self.count)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.out is not None and (not self.out.endswith(".jsonl") or self.json or self.show == "tokens"):
            raise ValueError("out is a .jsonl file that takes the place of what is printed: leave out json and show")
        self.check_api(show=self.show == "tokens", engine=self.engine != "auto", dtype=self.dtype != "float32")
        for i, prompt in enumerate(self.prompts):
            if not prompt:
                raise ValueError(f"prompt {i} is empty: write something to continue from")
        if self.chat is False and self.system is not None:
            raise ValueError("a system message needs the chat template: leave out --no-chat, or put it into the prompt")


KEY_VARIABLE = "ROLECALL_SERVER_KEY"
"""The environment variable that holds a server's key, for who serves and for who asks."""


def server_key(*others: str) -> str | None:
    """The key of servers, from the environment variable for it, or from the first of `others` that is set."""
    name, key = next(((n, k) for n in (KEY_VARIABLE, *others) if (k := os.environ.get(n))), (KEY_VARIABLE, None))
    if key is not None and not re.fullmatch("[!-~]+", key):
        raise UserError(f"the key in the environment variable {name} is not of ASCII without spaces: give another one")
    return key


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """A model behind HTTP: tokens in and out, and for clients of OpenAI's API. Every request needs the key in
    the environment variable ROLECALL_SERVER_KEY; without one, a key is made and printed."""

    command: ClassVar[str] = "serve"
    model: str = field(metadata={"bare": True})
    """`tiny`, a model directory, a .gguf file, a Hugging Face hub id, or a run's directory."""
    host: str = "127.0.0.1"
    """The address to listen on. Another one than this machine's own sends key and tokens over the network in the clear."""
    port: int = 8750
    """0 is any that is free."""
    hosts: tuple[str, ...] = ()
    """Names by which others call this server, in addition to `host` and localhost; repeat the flag for several."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The numbers to compute in."""
    vllm: bool = False
    """Serve with vLLM, in an environment of its own that is made at first use (docs/vllm.md)."""
    vllm_python: str | None = None
    """With vllm: the python of an environment that has vLLM already, such as one for your GPUs."""
    vllm_args: str = ""
    """With vllm: more of vLLM's own arguments, such as `--tensor-parallel-size 2`."""
    policy: LoadOptions = field(default_factory=LoadOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port must lie in 0..65535, got {self.port}")
        given = next((name for name in ("servers", "workers", "placed_servers") if getattr(self.engine, name)), None)
        if given is not None:
            raise ValueError(
                f"engine.{given} is for commands that sample elsewhere; serve samples itself: leave it out"
            )
        if not self.vllm:
            if self.vllm_python is not None or self.vllm_args:
                raise ValueError("vllm_python and vllm_args are about vLLM: give vllm too")
            return
        unused = {"engine.name": self.engine.name != "auto", "policy.attention": self.policy.attention != "auto"}
        for name in (name for name, given in unused.items() if given):
            raise ValueError(f"{name} is about our own engine: leave it out, or leave out vllm")


@dataclass(frozen=True, kw_only=True)
class PlayOptions(ModelUseOptions):
    """Episodes of several turns, as a conversation or token by token."""

    command: ClassVar[str] = "play"
    env: str = field(metadata=AGENT_FLAG)
    """The environment: calculator, guessing, kuhn, file.py:Class, gym:ID, agent:file.py:function."""
    rows: str | None = None
    """What it starts from; left out, the environment's own held-out rows, or seeds."""
    n: int = 1
    """How many rows to play, once each."""
    seed: int = 0
    """The same seed plays the same episodes."""
    show: Literal["text", "tokens"] = "text"
    """text: who said what. tokens: every token with its author, role and log-prob."""
    json: bool = False
    """Print one JSON object for each player of each episode."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    agent: AgentOptions = field(default_factory=AgentOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n must be at least 1 episode, got {self.n}")


@dataclass(frozen=True, kw_only=True)
class ProposeOptions(ModelUseOptions):
    """Rows that a model makes for an environment: kept if their solution solves them, they are new, and the policy solves them
    now and then."""

    command: ClassVar[str] = "propose"
    env: str = field(metadata=AGENT_FLAG)
    """The environment: calculator, guessing, file.py:Class, gym:ID."""
    out: str
    """The file of rows to write (.jsonl)."""
    proposer: str = "policy"
    """Who proposes: `policy`, the address of an OpenAI-compatible API, or file.py:function, which gets a list of questions
    and returns a list of texts."""
    rows: str | None = None
    """Rows that are there already: shown to the proposer, and what new ones must differ from. Left out, the environment's own."""
    given: int = 256
    """How many of these at most."""
    n: int = 64
    """Proposals to ask for."""
    explore: int = 2
    """Rows, and how the policy played them, that the proposer reads each time."""
    proposal_tokens: int = 256
    """Longest proposal."""
    share: float = 0.5
    """The share of the written rows that are new ones, at most; the others are the given ones. 1: new ones alone."""
    solved: float = 1.0
    """An episode that was given this much in all has solved its row."""
    words: float = 0.8
    """Rows that share more than this part of their words are alike."""
    meaning: float = 0.999
    """Rows whose mean hidden states in the model have a larger cosine are alike."""
    tries: int = 8
    """Episodes of the policy that tell how hard a row is."""
    hardest: float = 0.1
    """Rows of which it solves a smaller share are too hard."""
    easiest: float = 0.9
    """Rows of which it solves a larger share are too easy."""
    seed: int = 0
    """The same seed gives the same rows, if the proposer does."""
    overwrite: bool = False
    """Replace the file that `out` names."""
    json: bool = False
    """Print what came of it as one JSON object."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    agent: AgentOptions = field(default_factory=AgentOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        for name in ("given", "n", "explore", "proposal_tokens", "tries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share is a part of the rows, above 0 and at most 1, got {self.share:g}")
        if not 0 <= self.hardest <= self.easiest <= 1:
            raise ValueError(
                f"hardest and easiest are shares of episodes, from 0 to 1 and in this order, got {self.hardest:g} and {self.easiest:g}"
            )


@dataclass(frozen=True, kw_only=True)
class RescoreOptions(RewardProcessOptions):
    """Apply another reward to the answers a run has stored: `rolecall rescore runs/x --reward f`. Nothing is sampled, and
    the run stays as it is; what comes out is a new one, for `rolecall rl --from`."""

    command: ClassVar[str] = "rescore"
    run: str = field(metadata={"bare": True})
    """The run whose rollouts are scored again, or what was its `store.url`."""
    reward: tuple[str, ...] = ()
    """Reward functions: file.py:name, module:name, a built-in verifier, or a reward model's run. A task brings its own."""
    reward_weights: tuple[float, ...] | None = None
    """One weight per reward; 1 each if not given."""
    rows: str | None = None
    """The rows that the run answered, for the columns that rewards ask for; those it names itself if not given."""
    out: str | None = None
    """Where the new run goes; next to the old one, as NAME-rescored-NUMBER, if not given. Nothing is ever overwritten."""
    quiet: bool = False
    """Say nothing while running."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """A page to look at a run: what ran, before and after, curves, and some answers token by token. Several runs are compared
    on one page."""

    command: ClassVar[str] = "report"
    run: tuple[str, ...] = field(metadata={"bare": True})
    """The directory of a run or of a demo; one that is still running is shown as far as it has come. Several runs are compared."""
    out: str | None = None
    """The file to write; report.html in the run's directory if not given. A comparison needs it."""
    png: bool = False
    """Also write each curve as a picture into `curves/` next to the page (needs `rolecall[plot]`)."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What looks wrong with a run, from its files: how sure, which steps and answers show it, and the setting to try first.

    The exit code is 1 if something is found.
    """

    command: ClassVar[str] = "doctor"
    run: str = field(metadata={"bare": True})
    """The directory of a run; one that is still running is looked at as far as it has come."""
    json: bool = False
    """Print the findings as JSON."""


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """Where two runs part, from their files: the first step, answer and token, and what differs there. With several seeds on
    each side, how far apart their numbers end and whether that is more than noise.

    The exit code is 0 if the runs are the same as far as both go, and 1 if they part.
    """

    command: ClassVar[str] = "diff"
    runs: tuple[str, ...] = field(metadata={"bare": True})
    """The directories of the runs: the first is compared with each other one. Runs whose settings are equal but for the seed
    are one side."""
    against: tuple[str, ...] = field(default=(), metadata={"words": True})
    """The runs of the other side, where equal settings do not tell the sides apart: `A1 A2 --against B1 B2`."""
    json: bool = False
    """Print all that was found as one JSON object."""


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """Upload a run's model to the Hugging Face hub, with a model card made from the run and its report."""

    command: ClassVar[str] = "push"
    run: str = field(metadata={"bare": True})
    """The directory of a run of sft, rm, rl, dpo or expert-iteration that has ended."""
    repo: str = field(metadata={"bare": True})
    """Where it goes: a hub id such as me/my-model; it is made if it is not there."""
    private: bool = True
    """Make a new repository private; the report shows prompts and answers of the run. --no-private makes it public."""
    out: str | None = None
    """The folder to write before uploading; `push` in the run's directory if not given."""
    dry_run: bool = False
    """Write the folder, say where, and upload nothing."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """SFT, a reward model, PPO and GRPO on the built-in model, in a few minutes on a laptop."""

    command: ClassVar[str] = "demo"
    out: str | None = None
    """The directory for the four runs; runs/demo-NUMBER if not given."""
    quick: bool = False
    """Fewer steps and held-out problems, for about a minute; the models learn less."""
    seed: int = 0
    """Seeds everything."""
    quiet: bool = False
    """Only the table at the end."""


@dataclass(frozen=True, kw_only=True)
class ConformanceOptions:
    """Run the conformance cases against a library's own functions: masks, aggregation, returns, advantages, KL, losses.

    The exit code is 1 if something differs.
    """

    command: ClassVar[str] = "conformance"
    adapter: str = field(metadata={"bare": True})
    """A Python file with functions of the library (docs/conformance.md says which), or one that ships: rolecall, trl,
    verl, openrlhf."""
    json: bool = False
    """Print every case as JSON instead of a table."""


@dataclass(frozen=True, kw_only=True)
class EnvOptions:
    """Versions and hardware, to paste into a bug report."""

    command: ClassVar[str] = "env"
