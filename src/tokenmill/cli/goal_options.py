"""The options that say what a plan must reach and what it may use."""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Self, get_args

from cyclopts import Parameter

from tokenmill.config import ReserveConfig
from tokenmill.errors import UsageError
from tokenmill.plan.goal import DialectName, Goal
from tokenmill.units import MIB, parse_bytes


def _size(_type: Any, tokens: Any) -> int:
    try:
        return parse_bytes(tokens[0].value)
    except ValueError as error:
        raise UsageError(str(error)) from error


Size = Annotated[int, Parameter(converter=_size)]
ALIASES = {"llama_cpp": "llama.cpp", "llamacpp": "llama.cpp", "ik_llama.cpp": "ik_llama", "ik": "ik_llama"}


def _engine(_type: Any, tokens: Any) -> str:
    said = str(tokens[0].value)
    name: str = ALIASES.get(said.lower(), said.lower())
    if name not in get_args(DialectName):
        raise UsageError(f"no engine {said!r} is known", hint=f"known: {', '.join(get_args(DialectName))}")
    return name


Engine = Annotated[DialectName, Parameter(converter=_engine)]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Knobs:
    """What the user wants of a plan, whatever engine it is for."""

    context: int | None = None
    """Tokens of context for each sequence."""

    sequences: int | None = None
    """Sequences worked on at once."""

    ubatch: int | None = None
    """Tokens computed at once in prefill; default: what the forecast says is best."""

    batch: int | None = None
    """Tokens submitted at once."""

    cache_type: str | None = None
    """Type of K and V in the cache: f16, q8_0, q4_0, ..."""

    cache_type_k: str | None = None
    """Type of K alone."""

    cache_type_v: str | None = None
    """Type of V alone."""

    threads: int | None = None
    """Threads for decoding; default: physical cores less those reserved."""

    threads_batch: int | None = None
    """Threads for prefill."""

    cpu_only: bool = False
    """Use no GPU."""

    gpus: str | None = None
    """Use only these GPUs, such as 0,2."""

    reserve_ram: Size | None = None
    """Memory to keep for other work, such as "64 GiB"; default: the configuration's."""

    reserve_cores: int | None = None
    """Cores to keep for other work; default: the configuration's."""

    margin: Size = 512 * MIB
    """Memory to keep free on every GPU at full context; default: 512 MiB."""

    cache_ram: Size = 0
    """Host memory for the engine's prompt cache."""

    moe_cache: Size = 0
    """Memory on the GPUs for experts that stay in host memory, where the build has such a cache (llama.cpp)."""

    mmap: Annotated[bool | None, Parameter(negative="--no-mmap")] = None
    """Map the model file, or read it; default: map it where both copies fit."""

    repack: Annotated[bool | None, Parameter(negative="--no-repack")] = None
    """Let the engine rewrite host weights for its kernels, or not."""

    mlock: bool = False
    """Lock weights in memory."""

    allow_disk: bool = False
    """Let experts that no memory holds stay on disk."""

    own_fit: bool = False
    """Let the engine place layers by its own rule (ik_llama's --fit)."""

    fit_margin: str | None = None
    """MiB for that rule: one number, or one for each GPU."""

    gpu_memory_utilization: float = 0.9
    """Share of each GPU that vLLM may use; default: 0.9."""

    tensor_parallel: int = 1
    """GPUs that vLLM splits every layer over."""

    def reserving(self, reserve: ReserveConfig) -> Self:
        """These options, with the configuration's reserves where none were said."""
        return replace(
            self,
            reserve_ram=reserve.ram_bytes if self.reserve_ram is None else self.reserve_ram,
            reserve_cores=reserve.cores if self.reserve_cores is None else self.reserve_cores,
        )

    def goal_for(self, engine: DialectName) -> Goal:
        """The goal these options describe, for one engine."""
        for name in ("context", "sequences", "ubatch", "batch", "threads", "threads_batch", "tensor_parallel"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        if (self.reserve_cores or 0) < 0:
            raise UsageError("--reserve-cores cannot be negative")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UsageError("--gpu-memory-utilization is a share between 0 and 1")
        if self.cpu_only and self.gpus is not None:
            raise UsageError("--cpu-only and --gpus contradict each other", hint="give one of them")
        if self.fit_margin is not None and not self.own_fit:
            raise UsageError("--fit-margin is for the engine's own fit", hint="add --own-fit, or use --margin")
        if self.batch is not None and self.ubatch is not None and self.batch < self.ubatch:
            raise UsageError(
                f"--batch {self.batch} is smaller than --ubatch {self.ubatch}", hint=f"--batch {self.ubatch} or more"
            )
        margins = _numbers(self.fit_margin, "--fit-margin") or ()
        return Goal(
            context=self.context,
            sequences=self.sequences,
            engine=engine,
            cache_type_k=self.cache_type_k or self.cache_type,
            cache_type_v=self.cache_type_v or self.cache_type,
            ubatch=self.ubatch,
            batch=self.batch,
            threads=self.threads,
            threads_batch=self.threads_batch,
            cpu_only=self.cpu_only,
            gpus=_numbers(self.gpus, "--gpus"),
            reserve_ram_bytes=self.reserve_ram or 0,
            reserve_cores=self.reserve_cores or 0,
            gpu_margin_bytes=self.margin,
            cache_ram_bytes=self.cache_ram,
            moe_cache_bytes=self.moe_cache,
            mmap=self.mmap,
            mlock=self.mlock,
            repack=self.repack,
            allow_disk=self.allow_disk,
            own_fit=self.own_fit,
            fit_margin_bytes=tuple(size * MIB for size in margins),
            gpu_memory_utilization=self.gpu_memory_utilization,
            tensor_parallel=self.tensor_parallel,
        )


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class GoalOptions(Knobs):
    """What the user wants of a plan."""

    engine: Engine | None = None
    """llama.cpp (today's, the default), llama.cpp-2025 (stores K and V of a latent cache apart), ik_llama, or vllm."""

    def goal(self) -> Goal:
        """The goal these options describe."""
        return self.goal_for(self.engine or "llama.cpp")

    def beside_command(self, read: Goal) -> Goal:
        """A command's goal with what the user adds to it; UsageError where the command decides."""
        own = ("engine", "reserve_ram", "margin")
        said = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        decided = [name for name in said if name not in own]
        if decided:
            raise UsageError(
                f"--{decided[0].replace('_', '-')} is the command's to say",
                hint="change it in the command; --engine, --reserve-ram and --margin go beside --from-command",
            )
        return replace(read, reserve_ram_bytes=self.reserve_ram or 0, gpu_margin_bytes=self.margin)


def _numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise UsageError(f"{option} takes numbers with commas between them, not {text!r}")
    return tuple(int(part) for part in parts)
