"""Groups of options that several commands share."""

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rolecall.config.plan import processes
from rolecall.config.rewards import RewardProcessOptions
from rolecall.config.sampling import Sampling


def split_at_commas(given: tuple[str, ...]) -> tuple[str, ...]:
    """A list that may be given with commas, as several values, or both."""
    return tuple(part for value in given for part in value.split(","))


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run is kept and how it is started. None of these change what is learned."""

    command: ClassVar[str]
    either: ClassVar[tuple[str, ...]] = ()
    """Options of which one is given: a later source that gives one overrides the others."""
    out: str | None = None
    """The run's directory; runs/COMMAND-NUMBER if not given."""
    resume: bool = False
    """Continue the run in `out` from its last checkpoint, with its settings; options given here override them."""
    extend: int = 0
    """With resume: how many steps to add (`--steps +500` is the same)."""
    strict: bool = False
    """With resume: a damaged checkpoint is an error, instead of a warning and the checkpoint before it."""
    overwrite: bool = False
    """Remove the run in `out` before starting."""
    grace: float = 30.0
    """Seconds from SIGTERM or Ctrl-C to the end. After two thirds of them the rollout or evaluation in flight is dropped;
    the rest is for saving. Keep it below what your scheduler allows before it kills."""
    rank_timeout: float = 60.0
    """In a job of several processes: seconds without a sign of life after which a process counts as lost."""
    device: str = "auto"
    """Where the model trains: `cpu`, `cuda`, `cuda:1` or `xpu`; `auto` is the accelerator if torch finds one that can train, else the
    CPU. The native engine samples on the CPU, so elsewhere answers come from the hf engine, or from servers (docs/gpu.md)."""
    view: bool = False
    """Start `rolecall view` beside the run and print the address of its page; it ends with the run (needs `rolecall[view]`)."""
    quiet: bool = False
    """Say nothing while running."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d+)?", self.device):
            raise ValueError(f"device must be auto, cpu, cuda, cuda:NUMBER or xpu, got {self.device!r}")
        if self.extend and not self.resume:
            raise ValueError("extend adds steps to a run that is there: give resume too")
        if self.strict and not self.resume:
            raise ValueError("strict is about the checkpoints of a run to resume: give resume too")
        for name, seconds in (("grace", self.grace), ("rank_timeout", self.rank_timeout)):
            if not seconds > 0:
                raise ValueError(f"{name} must be above 0 seconds, got {seconds:g}")
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite contradict each other: give one of them")
        if self.resume and self.out is None:
            raise ValueError("resume needs out: which run?")
        passes = getattr(self, "epochs", None) if self.either else None
        if passes is not None and not passes > 0:
            raise ValueError(f"epochs must be above 0, got {passes}")

    def _at_least_one(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def _shared_out(self, *names: str) -> None:
        """Each process of the job takes its share of a step, and none may have nothing to do."""
        for name in names:
            if getattr(self, name) < processes():
                raise ValueError(
                    f"{name} is {getattr(self, name)}, which {processes()} processes cannot share: give at least "
                    f"{processes()}, or start fewer processes"
                )


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How the model is read."""

    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"] = "auto"
    """What transformers computes attention with; `auto` is sdpa where the model supports it, else eager."""
    trust_remote_code: bool = False
    """Run Python code that the model's directory or hub repository brings. Read it first: it can do anything."""


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(LoadOptions):
    """How the model is held while it trains."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """The weights' dtype while training."""
    mixed_precision: Literal["no", "bf16"] = "no"
    """bf16: the forward and backward passes run in bfloat16 where that is safe, weights and optimiser stay as they are."""
    tf32: bool = False
    """On an NVIDIA GPU: matrix products of float32 numbers round them to 10 bits first (TF32), which is several times faster. Engine
    and trainer then agree less well."""
    compile: bool = False
    """Compile the model's layers with torch.compile, in place of the forward pass without padding. The first steps take
    minutes."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    lora_rank: int | None = field(default=None, metadata={"known_as": ("lora_r", "r")})
    """Train a low-rank adapter of this rank instead of all weights (needs `rolecall[lora]`)."""
    lora_alpha: float | None = None
    """The adapter's scale; twice the rank if not given."""
    lora_targets: tuple[str, ...] = ()
    """Layers that get one, by the end of their names, such as `q_proj,v_proj`; all linear ones but the head if not given."""
    lora_rs: bool = False
    """Scale the adapter by alpha / sqrt(rank), not alpha / rank (rsLoRA)."""
    lora_dropout: float = 0.0
    """Share of the adapter's inputs that training drops; sampling, scoring and evaluation drop nothing. RL needs
    `algorithm.old_logprobs` detach."""
    quantize: Literal["none", "int8", "int4"] = "none"
    """Hold the model below a LoRA adapter in 8 bits, or in 4 (NF4): less memory, more time."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lora_targets", split_at_commas(self.lora_targets))
        if self.quantize != "none" and self.lora_rank is None:
            raise ValueError(f"quantize {self.quantize} holds weights that do not train: give lora_rank too")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(
                f"lora_dropout is the share of inputs to drop, from 0 to below 1, got {self.lora_dropout:g}"
            )
        if self.lora_rank is None and (
            self.lora_alpha is not None or self.lora_targets or self.lora_rs or self.lora_dropout
        ):
            raise ValueError(
                "lora_alpha, lora_targets, lora_rs and lora_dropout belong to an adapter: give lora_rank too"
            )
        if self.lora_rank is not None and self.lora_rank < 1:
            raise ValueError(f"lora_rank must be at least 1, got {self.lora_rank}")


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How prompts become tokens."""

    system_prompt: str | None = None
    """Put before every conversation that has no system message."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the chat template, such as {"enable_thinking": false}."""


@dataclass(frozen=True, kw_only=True)
class OptimOptions:
    """The optimiser (AdamW) and its schedule."""

    lr: float = 1e-5
    """Learning rate of the policy after warm-up."""
    critic_lr: float | None = None
    """Learning rate of a critic; the policy's if not given."""
    beta1: float = 0.9
    """Decay of the mean gradient."""
    beta2: float = 0.999
    """Decay of the mean squared gradient."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on matrices only."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What it does after warm-up: stay, or fall to 0 at the last step."""
    max_grad_norm: float | None = 1.0
    """Clip the gradient to this norm."""
    token_budget: int = 8192
    """Tokens in a micro-batch, padding included. Changes memory and speed, not the result (but what LoRA dropout drops)."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr must be above 0, got {self.lr}: with a learning rate of 0 nothing would be learned")
        if (self.critic_lr or 0) < 0:
            raise ValueError(f"critic_lr must not be negative, got {self.critic_lr}")
        if self.token_budget < 1:
            raise ValueError(f"token_budget must be at least 1, got {self.token_budget}")


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """How the processes that torchrun starts hold the model."""

    shard: Literal["auto", "none", "ddp", "fsdp2"] = "auto"
    """`ddp`: every process holds all of it. `fsdp2`: weights, gradients, optimiser, reference, critic and reward model lie
    in parts on all of them. `none`: one process. `auto` is `none` for one process and `ddp` for several."""
    offload: tuple[Literal["reference", "optimizer"], ...] = ()
    """With fsdp2 on an accelerator: what lies in the host's memory while it is not used. `reference` is the reference and a
    reward model, `optimizer` the policy's weights, gradients and moments."""

    def __post_init__(self) -> None:
        if self.shard == "none" and processes() > 1:
            raise ValueError(f"train.shard none is for one process, and there are {processes()}: give ddp or fsdp2")
        if self.offload and self.shard != "fsdp2":
            raise ValueError("train.offload is for parts of a sharded model: give train.shard fsdp2 too")


SERVED_ONLY = ("vllm", "sglang")
"""Engines that are found behind servers only, and have kernels of their own."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What samples the answers."""

    name: Literal["auto", "native", "hf", "vllm", "sglang"] = "auto"
    """`native` for Llama-family models, `hf` for every other; `auto` chooses. Of servers: what they run, found out by `auto`."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """The sampler's dtype; the model's if not given. Of servers: theirs, found out if not given."""
    max_rows: int = 256
    """Answers that grow at a time."""
    workers: int = 0
    """Processes that sample, each with an engine of its own (docs/cluster.md); 0: the one that trains."""
    cluster: Literal["none", "ray"] = "none"
    """`ray`: Ray places the workers or servers, on the cluster that RAY_ADDRESS names or one that is started here (needs
    `rolecall[ray]`)."""
    worker_prompts: int = 1
    """Prompts that a worker answers together. Answers depend on it (a little), but not on the number of workers."""
    worker_threads: int = 1
    """Threads of each worker."""
    worker_silence: float = 20.0
    """Seconds without a sign of life after which a worker is replaced and its prompts are given to another."""
    worker_deadline: float = 600.0
    """Seconds that a worker may take for its prompts before the same happens."""
    servers: tuple[str, ...] = ()
    """Addresses of servers that sample, such as http://127.0.0.1:8750 (`rolecall serve`, docs/servers.md); several with commas
    between them. Their key is read from the environment variable ROLECALL_SERVER_KEY. worker_silence and worker_deadline hold for them
    too."""
    placed_servers: int = 0
    """With cluster ray: servers (`rolecall serve`) that Ray starts and places for this run, in place of engine.servers."""
    server_cpus: int = 1
    """CPUs that each placed server asks Ray for."""
    server_gpus: float = 0.0
    """GPUs that each placed server asks Ray for; it sees these only."""
    server_args: str = ""
    """More words for each placed `rolecall serve`, such as `--vllm --dtype bfloat16`."""
    server_patience: float = 300.0
    """Seconds that all servers may be out of reach before the run ends, with exit code 75."""
    sync: Literal["directory", "broadcast"] = "directory"
    """How servers get weights: they read files, or are sent them; or all of them at once by torch.distributed (gloo, or NCCL
    on GPUs), for servers on other machines of a network that you trust (docs/servers.md)."""
    weights_directory: str | None = None
    """A directory that the servers see too, through which they get the weights. Left out: servers on this machine read a
    temporary one, others are sent the weights."""

    def __post_init__(self) -> None:
        if self.servers:
            object.__setattr__(self, "servers", split_at_commas(self.servers))
            self._check_servers()
        elif self.placed_servers:
            self._check_placed()
        elif self.weights_directory is not None or self.name in SERVED_ONLY or self.sync != "directory":
            given = (
                f"name {self.name}"
                if self.name in SERVED_ONLY
                else "weights_directory"
                if self.weights_directory
                else "sync"
            )
            raise ValueError(f"engine.{given} is for servers: give engine.servers too")
        if self.cluster != "none" and not (self.workers or self.placed_servers):
            raise ValueError(
                f"engine.cluster {self.cluster} says where engine.workers or engine.placed_servers are: give their number too"
            )
        if not self.placed_servers and (self.server_cpus != 1 or self.server_gpus or self.server_args):
            raise ValueError("engine.server_* are of engine.placed_servers: give their number too")
        if self.workers < 0 or self.worker_prompts < 1 or self.worker_threads < 1:
            raise ValueError(
                "engine.workers is 0 or a number of processes, worker_prompts and worker_threads are at least 1, got "
                f"{self.workers}, {self.worker_prompts} and {self.worker_threads}"
            )
        if not (self.worker_silence > 0 and self.worker_deadline > 0):
            raise ValueError("engine.worker_silence and worker_deadline must be above 0 seconds")

    def _check_placed(self) -> None:
        if self.cluster != "ray" or self.workers:
            raise ValueError(
                "engine.placed_servers are placed by Ray, in place of engine.workers: give engine.cluster ray alone"
            )
        if self.placed_servers < processes() or self.server_cpus < 0 or self.server_gpus < 0:
            raise ValueError(
                f"engine.placed_servers is at least one for each of the {processes()} processes that train, server_cpus and "
                f"server_gpus are 0 or more, got {self.placed_servers}, {self.server_cpus} and {self.server_gpus:g}"
            )

    def _check_servers(self) -> None:
        if self.workers or self.placed_servers:
            given = "workers" if self.workers else "placed_servers"
            raise ValueError(f"engine.{given} and engine.servers both say what samples: give one of them")
        if self.max_rows != EngineOptions.max_rows:
            raise ValueError("engine.max_rows is for who samples: give it to the servers when they are started")
        for url in self.servers:
            if not re.fullmatch(r"https?://[^/?#@\s]+", url):
                raise ValueError(f"engine.servers wants addresses such as http://127.0.0.1:8750, got {url!r}")
        if len(set(self.servers)) < len(self.servers):
            raise ValueError("engine.servers names the same server twice")
        if self.sync == "broadcast" and self.weights_directory is not None:
            raise ValueError("engine.weights_directory is for engine.sync directory: give one of the two")
        if not self.server_patience > 0:
            raise ValueError(f"engine.server_patience must be above 0 seconds, got {self.server_patience:g}")
        if processes() > len(self.servers):
            raise ValueError(
                f"{processes()} processes train and each has servers of its own, but engine.servers are "
                f"{len(self.servers)}: give at least as many"
            )


@dataclass(frozen=True, kw_only=True)
class HeldOutOptions:
    """Evaluation on held-out rows."""

    every: int = 0
    """Steps between evaluations; there is one before the first step and one at the end, too. 0: never."""
    rows: int = 256
    """How many rows to evaluate on at most."""
    data: str | None = None
    """The rows to evaluate on: whatever `rows` may be. All of `rows` then train. Left out: the data's own test split, or
    a share of the rows."""
    samples: int = 1
    """Answers per row for avg@k and pass@k; 1 is greedy only."""
    held_out: float = 0.05
    """The share of the rows kept out of training, if the data has no test split of its own."""
    reward: tuple[str, ...] = ()
    """What scores held-out answers, if not the reward that trains: functions, a reward model's run, or `task` for the
    task's own. The training reward of the same answers is then logged as `eval_train_reward`."""
    stop_at: float | None = None
    """End the run when the evaluation's main number reaches this."""

    def __post_init__(self) -> None:
        if self.reward and not self.every:
            raise ValueError("eval.reward scores evaluations, and there are none: give eval.every too")
        if self.data is not None and not self.every:
            raise ValueError("eval.data is for evaluations, and there are none: give eval.every too")


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Checkpoints and records."""

    every: int = 50
    """Steps between checkpoints; there is one at the end, too. 0: only that."""
    keep: int = 2
    """How many checkpoints stay, besides the best one."""
    rollouts: int = 20
    """Steps whose rollouts stay on disk, in addition to every 50th."""
    updates: int = 2
    """Steps whose per-token updates stay on disk, in addition to every 50th."""
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Also log to these (needs `rolecall[track]`)."""

    def __post_init__(self) -> None:
        if self.keep < 2:
            raise ValueError(
                f"save.keep must be at least 2, got {self.keep}: one to fall back to if the other is damaged"
            )


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(RunOptions):
    """What every command says that trains a language model."""

    model: str = "tiny"
    """`tiny` (built in), a model directory, a .gguf file, a Hugging Face hub id, or a run's directory."""
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    chat: ChatOptions = field(default_factory=ChatOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    train: TrainerOptions = field(default_factory=TrainerOptions)
    eval: HeldOutOptions = field(default_factory=HeldOutOptions)
    save: SaveOptions = field(default_factory=SaveOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy.compile and self.train.shard == "fsdp2":
            raise ValueError("policy.compile is for models that every process holds whole: leave out train.shard fsdp2")


@dataclass(frozen=True, kw_only=True)
class AnsweringOptions(RewardProcessOptions):
    """What every command says that samples answers to prompts and scores them."""

    reward: tuple[str, ...] = ()
    """Reward functions: file.py:name, module:name, a built-in verifier; a reward model's run; or judge:URL (docs/rewards.md). A task brings its
    own, which is also called `task`."""
    reward_weights: tuple[float, ...] | None = None
    """One weight per reward; 1 each if not given."""
    sampling: Sampling = field(default_factory=Sampling)
    engine: EngineOptions = field(default_factory=EngineOptions)
