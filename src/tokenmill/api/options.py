"""The options of plans and engines.

`tokenmill.plan`, `run`, `load`, `serve` and `tune` take these names as keyword arguments; the command line adds its own
spelling to them (`cli/options.py`).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self, TypedDict, get_args, get_type_hints

from tokenmill.config import MAX_THREADS, Config, EngineConfig, EngineEntry, ReserveConfig
from tokenmill.errors import UsageError
from tokenmill.model.read import read
from tokenmill.planner.goal import DialectName, Goal, Speculation
from tokenmill.units import MIB, parse_bytes

ENGINES: dict[str, DialectName] = {
    "native": "llama.cpp",
    "llama-server": "llama.cpp",
    "ik_llama": "ik_llama",
    "vllm": "vllm",
}
"""Engines that can be started, with the dialect that each is planned for."""
_ALIASES = {
    "llama.cpp": "llama-server",
    "llama_cpp": "llama-server",
    "llamacpp": "llama-server",
    "ik_llama.cpp": "ik_llama",
    "ik": "ik_llama",
}
_ENTRY_KEYS = (
    "context",
    "sequences",
    "threads",
    "threads_batch",
    "cpu_only",
    "cache_type",
    "gpu_memory_utilization",
    "binary",
    "port",
)
"""Keys of `[[engines]]` that are options of the same name."""
_AT_LEAST_ONE = (
    "context",
    "sequences",
    "ubatch",
    "batch",
    "threads",
    "threads_batch",
    "tensor_parallel",
    "draft_tokens",
)
_SIZES = ("reserve_ram", "margin", "cache_ram", "moe_cache")


def dialect_of(engine: EngineConfig) -> DialectName:
    """The dialect that an engine is planned for; a native engine on ik_llama.cpp has its kernels and graphs."""
    from tokenmill.native.builds.finished import uses_ik  # noqa: PLC0415  opens the library's header

    return "ik_llama" if uses_ik(engine) else ENGINES[engine.kind]


def engine_name(asked: str) -> str:
    """The canonical name of an engine: `llama.cpp` is `llama-server`; unknown names are returned unchanged."""
    return _ALIASES.get(asked.lower(), asked.lower() if "://" not in asked else asked)


def known_engines() -> str:
    """All engine names, for hints."""
    return ", ".join((*ENGINES, *(name for name in get_args(DialectName) if "-20" in name)))


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of a plan; None leaves the choice to the planner."""

    context: int | None = None
    """Context length of each sequence, in tokens. [default: 32768, or less if memory is short]"""

    max_context: bool = False
    """Use the longest context that fits, for one sequence unless --sequences is given."""

    sequences: int | None = None
    """Number of sequences decoded concurrently. [default: chosen by the planner]"""

    ubatch: int | None = None
    """Micro-batch size of prefill, in tokens. [default: the one with the best forecast]"""

    batch: int | None = None
    """Logical batch size of prefill, in tokens. [default: 2048, or the micro-batch size if larger]"""

    cache_type: str | None = None
    """Data type of the KV cache, such as f16, q8_0 or q4_0. [default: f16, or q8_0 if memory is short]"""

    cache_type_k: str | None = None
    """Data type of the K cache. [default: as --cache-type]"""

    cache_type_v: str | None = None
    """Data type of the V cache. [default: as --cache-type]"""

    threads: int | None = None
    """Threads for decoding. [default: physical cores minus reserved cores]"""

    threads_batch: int | None = None
    """Threads for prefill. [default: as --threads]"""

    cpu_only: bool = False
    """Do not use GPUs."""

    gpus: str | None = None
    """Use only these GPUs, such as 0,2. [default: all]"""

    reserve_ram: int | None = None
    """Memory to leave to other programs, such as "64 GiB". [default: from the configuration]"""

    reserve_cores: int | None = None
    """CPU cores to leave to other programs. [default: from the configuration]"""

    margin: int = 512 * MIB
    """Memory to keep free on every GPU at full context."""

    cache_ram: int = 0
    """Host memory for the engine's prompt cache."""

    moe_cache: int = 0
    """GPU memory for caching experts that stay in host memory (llama.cpp builds with such a cache)."""

    mmap: bool | None = None
    """Map the model file into memory instead of reading it. [default: chosen by the planner]"""

    repack: bool | None = None
    """Let the engine repack weights in host memory for its CPU kernels. [default: chosen by the planner]"""

    mlock: bool = False
    """Lock the weights in memory."""

    allow_disk: bool = False
    """Leave experts that do not fit in memory on disk."""

    mtp: bool = False
    """Draft tokens with the model's layers for multi-token prediction (llama-server and ik_llama)."""

    draft_model: str | None = None
    """A small model with the same vocabulary that drafts tokens (llama-server and ik_llama)."""

    draft_tokens: int | None = None
    """Tokens drafted per step with --mtp or --draft-model. [default: 3]"""

    own_fit: bool = False
    """Let the engine place layers by its own rule (ik_llama.cpp's --fit)."""

    fit_margin: str | None = None
    """Margin of --own-fit in MiB: one number, or one per GPU, such as 1024,2048."""

    gpu_memory_utilization: float = 0.9
    """Share of each GPU's memory that vLLM may use."""

    tensor_parallel: int = 1
    """Number of GPUs over which vLLM splits every layer."""

    def reserving(self, reserve: ReserveConfig) -> Self:
        """These options with the configured reserves for those that are not set."""
        return replace(
            self,
            reserve_ram=reserve.ram_bytes if self.reserve_ram is None else self.reserve_ram,
            reserve_cores=reserve.cores if self.reserve_cores is None else self.reserve_cores,
        )

    def goal_for(self, engine: DialectName) -> Goal:
        """The planner's goal for an engine; UsageError if options contradict each other or are out of range."""
        self._check()
        margins = _numbers(self.fit_margin, "fit_margin") or ()
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
            gpus=_numbers(self.gpus, "gpus"),
            reserve_ram_bytes=self.reserve_ram or 0,
            reserve_cores=self.reserve_cores or 0,
            gpu_margin_bytes=self.margin,
            cache_ram_bytes=self.cache_ram,
            moe_cache_bytes=self.moe_cache,
            mmap=self.mmap,
            mlock=self.mlock,
            repack=self.repack,
            allow_disk=self.allow_disk,
            speculation=self._speculation(),
            own_fit=self.own_fit,
            fit_margin_bytes=tuple(size * MIB for size in margins),
            gpu_memory_utilization=self.gpu_memory_utilization,
            tensor_parallel=self.tensor_parallel,
        )

    def for_command(self, read: Goal) -> Goal:
        """The goal of a command with these reserves; UsageError for options that the command sets."""
        accepted = ("engine", "reserve_ram", "margin")
        given = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        refused = [name for name in given if name not in accepted]
        if refused:
            raise UsageError(
                f"--{refused[0].replace('_', '-')} cannot be combined with --from-command",
                hint="change the command; only --engine, --reserve-ram and --margin can be added to it",
            )
        return replace(read, reserve_ram_bytes=self.reserve_ram or 0, gpu_margin_bytes=self.margin)

    def _speculation(self) -> Speculation | None:
        """What drafts tokens; the draft model's header is read."""
        if not self.mtp and self.draft_model is None:
            if self.draft_tokens is not None:
                raise UsageError("draft_tokens needs mtp or draft_model", hint="set one of them as well")
            return None
        if self.mtp and self.draft_model is not None:
            raise UsageError("mtp and draft_model contradict each other", hint="set only one of them")
        tokens = Speculation().tokens if self.draft_tokens is None else self.draft_tokens
        if self.draft_model is None:
            return Speculation(tokens)
        return Speculation(tokens, read(self.draft_model), self.draft_model)

    def _check(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1 (got {value})")
        for name in ("threads", "threads_batch"):
            value = getattr(self, name)
            if value is not None and value > MAX_THREADS:
                raise UsageError(
                    f"{name} must be 1-{MAX_THREADS} (got {value})",
                    hint="leave it out to use all physical cores",
                )
        for name in ("reserve_cores", *_SIZES):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageError(f"{name} must not be negative (got {value})")
        if not 0 < self.gpu_memory_utilization <= 1:
            share = self.gpu_memory_utilization
            raise UsageError(f"gpu_memory_utilization must be more than 0 and at most 1 (got {share:g})")
        if self.max_context and self.context is not None:
            raise UsageError("max_context and context contradict each other", hint="set only one of them")
        if self.cpu_only and self.gpus is not None:
            raise UsageError("cpu_only and gpus contradict each other", hint="set only one of them")
        if self.fit_margin is not None and not self.own_fit:
            raise UsageError("fit_margin needs own_fit", hint="set own_fit as well, or use margin")
        if self.batch is not None and self.ubatch is not None and self.batch < self.ubatch:
            raise UsageError(
                f"batch must not be smaller than ubatch (got {self.batch} and {self.ubatch})",
                hint=f"set batch to {self.ubatch} or more",
            )


@dataclass(frozen=True, slots=True)
class EngineOptions(PlanOptions):
    """The options of an engine and its plan."""

    engine: str | None = None
    """Engine: native (llama.cpp in a worker process), llama-server, ik_llama, vllm, or the URL of a running server.
    [default: from the configuration, or native]"""

    machine: str | None = None
    """Machine to plan for: this, a catalogue name or a machine file. [default: from the configuration, or this]"""

    binary: str | None = None
    """Path of the server's executable. [default: from the configuration; llama-server: the newest of
    `tokenmill engines builds`, or the wheel's; others: found on PATH]"""

    port: int | None = None
    """Port of the gateway, or of a server engine. [default: from the configuration, or 8181 and 8180]"""

    warm: bool | None = None
    """Fill the page cache and decode once before the engine is ready. [default: from the configuration, or yes]"""

    point: bool = True
    """Use the operating point found by `tokenmill tune` for settings that are not given."""

    @classmethod
    def of_entry(cls, entry: EngineEntry, kind: str) -> Self:
        """The options of an engine of the configuration."""
        given = {name: getattr(entry, name) for name in _ENTRY_KEYS}
        gpus = None if entry.gpus is None else ",".join(map(str, entry.gpus))
        return cls(engine=kind, gpus=gpus, **{name: value for name, value in given.items() if value is not None})

    @property
    def is_default(self) -> bool:
        """Whether all options but `engine` are at their default."""
        return all(getattr(self, field.name) == field.default for field in fields(self) if field.name != "engine")

    def engine_config(self, config: Config) -> EngineConfig:
        """The configured engine, overridden by these options, with the build of llama.cpp for this machine."""
        from tokenmill.native.builds.finished import with_build  # noqa: PLC0415  reads the machine if there are builds

        kind = engine_name(self.engine or config.engine.kind)
        if kind not in ENGINES and "://" not in kind:
            raise UsageError(f"unknown engine {kind!r}", hint=f"{', '.join(ENGINES)}, or a URL")
        given = config.engine
        engine = replace(
            given,
            kind=kind,
            binary=given.binary if self.binary is None else self.binary,
            port=given.port if self.port is None else self.port,
            warm=given.warm if self.warm is None else self.warm,
        )
        return with_build(engine, config.engines_path)


class EngineArguments(TypedDict, total=False):
    """`EngineOptions` as keyword arguments. Sizes may be strings such as "64 GiB"; gpus may be a number or a list."""

    context: int | None
    max_context: bool
    sequences: int | None
    ubatch: int | None
    batch: int | None
    cache_type: str | None
    cache_type_k: str | None
    cache_type_v: str | None
    threads: int | None
    threads_batch: int | None
    cpu_only: bool
    gpus: str | int | Sequence[int] | None
    reserve_ram: int | str | None
    reserve_cores: int | None
    margin: int | str
    cache_ram: int | str
    moe_cache: int | str
    mmap: bool | None
    repack: bool | None
    mlock: bool
    allow_disk: bool
    mtp: bool
    draft_model: str | Path | None
    draft_tokens: int | None
    own_fit: bool
    fit_margin: str | None
    gpu_memory_utilization: float
    tensor_parallel: int
    engine: str | None
    machine: str | Path | None
    binary: str | Path | None
    port: int | None
    warm: bool | None
    point: bool


def engine_options(arguments: Mapping[str, Any]) -> EngineOptions:
    """Keyword arguments as options; UsageError for an unknown name, a wrong type or a size that cannot be read."""
    check_names(arguments, EngineArguments)
    values = dict(arguments)
    for name in _SIZES:
        if isinstance(values.get(name), str):
            try:
                values[name] = parse_bytes(values[name])
            except ValueError as error:
                raise UsageError(f"{name}: {error}") from error
    gpus = values.get("gpus")
    if isinstance(gpus, int) and not isinstance(gpus, bool):
        values["gpus"] = str(gpus)
    elif isinstance(gpus, Sequence) and not isinstance(gpus, str):
        values["gpus"] = ",".join(map(str, gpus))
    for name, expected in get_type_hints(EngineOptions).items():
        if name in values:
            values[name] = _typed(name, values[name], expected)
    return EngineOptions(**values)


def check_names(arguments: Mapping[str, Any], accepted: type[Any]) -> None:
    """UsageError for a keyword argument that is not a key of the TypedDict `accepted`."""
    known = sorted(get_type_hints(accepted))
    for name in arguments:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
            raise UsageError(f"unknown option {name!r}", hint=hint)


def _typed(name: str, value: Any, expected: Any) -> Any:
    """The value as the type of its option: integers of NumPy and paths are converted; UsageError for other types."""
    types = get_args(expected) or (expected,)
    if bool not in types and isinstance(value, bool):
        pass
    elif isinstance(value, types) or (float in types and isinstance(value, int)):
        return value
    elif int in types and hasattr(value, "__index__"):
        return value.__index__()
    elif str in types and isinstance(value, os.PathLike):
        return os.fspath(value)
    words = " or ".join("None" if each is type(None) else each.__name__ for each in types)
    raise UsageError(f"{name} must be {words} (got {value!r})")


def _numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise UsageError(f"{option} must be numbers separated by commas (got {text!r})")
    return tuple(int(part) for part in parts)
