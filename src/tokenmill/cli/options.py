"""Command-line spelling of the plan, engine and request options; `api/options.py` defines what they mean.

The groups are the panels of a command's help.
"""

import json
import re
import time
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from cyclopts import Group, Parameter

from tokenmill.api import options as api
from tokenmill.api.options import engine_name, known_engines
from tokenmill.api.run_options import check_defaults
from tokenmill.errors import UsageError
from tokenmill.planner.goal import DialectName
from tokenmill.units import MIB, format_bytes, parse_bytes

SAMPLING = Group.create_ordered("Sampling", sort_key=1)
SETTINGS = Group.create_ordered("Context and concurrency", sort_key=2)
HARDWARE = Group.create_ordered("GPUs, cores and memory", sort_key=2)
ENGINE = Group.create_ordered("Engine", sort_key=2)
SERVERS = Group.create_ordered("ik_llama.cpp and vLLM", sort_key=2)

_MODEL = Parameter(name=("--model", "-m"), metavar="MODEL")
Model = Annotated[str | None, _MODEL]
# Both `tokenmill plan kimi.gguf` and `tokenmill plan -m kimi.gguf`.
ModelArgument = Annotated[str | None, _MODEL, Parameter(group="Arguments")]
RequiredModel = Annotated[str, _MODEL, Parameter(group="Arguments")]


def _size(_type: Any, tokens: Any) -> int:
    try:
        return parse_bytes(tokens[0].value)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _shown_size(size: int | None) -> str | None:
    return None if size is None else format_bytes(size).replace(".0 ", " ")


Size = Annotated[int, Parameter(converter=_size, metavar="SIZE", show_default=_shown_size)]


def _tokens(_type: Any, tokens: Any) -> int:
    return parse_tokens(tokens[0].value, tokens[0].keyword)


TokenCount = Annotated[int, Parameter(converter=_tokens, metavar="N")]


def parse_tokens(text: str, option: str) -> int:
    """A number of tokens: 16384, 16k in units of 1,024, or 1M; UsageError if it is not one."""
    match = re.fullmatch(r"\s*(-?\d+)\s*([kKmM]?)\s*", text)
    if match is None:
        raise UsageError(f"{option} must be a number of tokens (got {text!r})", hint="for example 16384 or 16k")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]


def _planned_engine(_type: Any, tokens: Any) -> str:
    asked = str(tokens[0].value)
    name = engine_name(asked)
    if name not in api.ENGINES and name not in get_args(DialectName):
        raise UsageError(f"unknown engine {asked!r}", hint=f"known: {known_engines()}")
    return name


_Options = TypeVar("_Options")
_PANELS = {
    SETTINGS: "context max_context sequences ubatch batch cache_type cache_type_k cache_type_v point",
    HARDWARE: "threads threads_batch cpu_only gpus reserve_ram reserve_cores margin cache_ram moe_cache "
    "mmap repack mlock allow_disk",
    SERVERS: "mtp draft_model draft_tokens own_fit fit_margin gpu_memory_utilization tensor_parallel",
}


def _in_panels(options: type[_Options]) -> type[_Options]:
    """Put the options of a dataclass, inherited ones included, into the panels of the help."""
    hints = get_type_hints(options, include_extras=True)
    for panel, names in _PANELS.items():
        for name in names.split():
            if name in hints:
                options.__annotations__[name] = Annotated[hints[name], Parameter(group=panel)]
    return options


@_in_panels
@Parameter(name="*", group=ENGINE)
@dataclass(frozen=True, slots=True)
class PlanFlags(api.PlanOptions):
    """The options of a plan for any engine."""

    context: Annotated[TokenCount | None, Parameter(alias="-c")] = None
    """Context length of each sequence in tokens, such as 16384 or 16k. [default: 32768, or less if memory is short]"""

    ubatch: TokenCount | None = None
    """Micro-batch size of prefill, in tokens. [default: the one with the best forecast]"""

    batch: TokenCount | None = None
    """Logical batch size of prefill, in tokens. [default: 2048, or the micro-batch size if larger]"""

    threads: Annotated[int | None, Parameter(alias="-t")] = None
    """Threads for decoding. [default: physical cores minus reserved cores]"""

    reserve_ram: Size | None = None
    """Memory to leave to other programs, such as 64GiB. [default: from the configuration]"""

    margin: Size = 512 * MIB
    """Memory to keep free on every GPU at full context."""

    cache_ram: Size = 0
    """Host memory for the engine's prompt cache."""

    moe_cache: Size = 0
    """GPU memory for caching experts that stay in host memory (llama.cpp builds with such a cache)."""

    mmap: Annotated[bool | None, Parameter(negative="--no-mmap")] = None
    """Map the model file into memory instead of reading it. [default: chosen by the planner]"""

    repack: Annotated[bool | None, Parameter(negative="--no-repack")] = None
    """Let the engine repack weights in host memory for its CPU kernels. [default: chosen by the planner]"""


@_in_panels
@Parameter(name="*", group=ENGINE)
@dataclass(frozen=True, slots=True)
class EngineFlags(PlanFlags, api.EngineOptions):
    """The options of a plan, and of the engine to start."""

    warm: Annotated[bool | None, Parameter(negative="--no-warm")] = None
    """Fill the page cache and decode once before the engine is ready. [default: from the configuration, or yes]"""

    point: Annotated[bool, Parameter(negative="--no-point")] = True
    """Use the operating point found by `tokenmill tune` for settings that are not given."""


@Parameter(name="*", group=ENGINE)
@dataclass(frozen=True, slots=True)
class GoalOptions(PlanFlags):
    """The options of a plan, and the engine to plan for."""

    engine: Annotated[str | None, Parameter(converter=_planned_engine)] = None
    """Engine to plan for: native, llama-server, ik_llama, vllm, or an older version such as llama.cpp-2025 (stores K
    and V of a latent cache separately) or ik_llama-2025. [default: from the configuration, or native]"""


@Parameter(name="*", group=SAMPLING)
@dataclass(frozen=True, slots=True)
class BodyOptions:
    """Request fields for jobs that do not set them."""

    max_tokens: Annotated[TokenCount | None, Parameter(alias="-n")] = None
    """Maximum tokens per answer, for jobs that do not set it. [default: up to the end of the context]"""

    temperature: float | None = None
    """Sampling temperature for jobs that do not set one; 0 is greedy. [default: the engine's]"""

    top_p: float | None = None
    """Nucleus sampling for jobs that do not set it: total probability of the candidates. [default: the engine's]"""

    seed: int | None = None
    """Sampling seed for jobs that do not set one. [default: the engine's]"""

    body: str | None = None
    """Other request fields for jobs that do not set them, as a JSON object such as '{"response_format": ...}'."""

    def defaults(self) -> dict[str, Any]:
        """The request fields to set; UsageError if one is invalid."""
        named = {"max_tokens": self.max_tokens, "temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}
        given = _object(self.body) | {key: value for key, value in named.items() if value is not None}
        check_defaults(given)
        return given


def _object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--body is not JSON: {error}", hint="""--body '{"min_p": 0.1}'""") from error
    if not isinstance(value, dict):
        raise UsageError("--body is not a JSON object", hint="""--body '{"min_p": 0.1}'""")
    return value


def when(time_s: float) -> str:
    """The local date and time of a Unix time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))
