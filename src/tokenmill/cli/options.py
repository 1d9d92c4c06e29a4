"""Command-line spelling of the plan, engine and request options; `api/options.py` defines what they mean.

The groups are the panels of a command's help.
"""

import json
import re
import time
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from cyclopts import Group, Parameter

from tokenmill.api import options as api
from tokenmill.api.options import engine_name, known_engines
from tokenmill.api.run_options import check_defaults
from tokenmill.errors import UsageError
from tokenmill.planner.goal import DialectName
from tokenmill.units import MIB, format_bytes, parse_bytes

SAMPLING = Group.create_ordered("Sampling", sort_key=1)
ENGINE = Group.create_ordered("Plan and engine", sort_key=2)


def _size(_type: Any, tokens: Any) -> int:
    try:
        return parse_bytes(tokens[0].value)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _shown_size(size: int | None) -> str | None:
    return None if size is None else format_bytes(size).replace(".0 ", " ")


Size = Annotated[int, Parameter(converter=_size, metavar="SIZE", show_default=_shown_size)]


def _tokens(_type: Any, tokens: Any) -> int:
    return parse_tokens(tokens[0].value, "--context")


def parse_tokens(text: str, option: str) -> int:
    """A number of tokens: 16384, or 16K in units of 1,024; UsageError if it is not one."""
    match = re.fullmatch(r"\s*(-?\d+)\s*([kK]?)\s*", text)
    if match is None:
        raise UsageError(f"{option} must be a number of tokens (got {text!r})", hint="for example 16384 or 16K")
    return int(match[1]) * (1024 if match[2] else 1)


def _planned_engine(_type: Any, tokens: Any) -> str:
    asked = str(tokens[0].value)
    name = engine_name(asked)
    if name not in api.ENGINES and name not in get_args(DialectName):
        raise UsageError(f"unknown engine {asked!r}", hint=f"known: {known_engines()}")
    return name


@Parameter(name="*", group=ENGINE)
@dataclass(frozen=True, slots=True)
class PlanFlags(api.PlanOptions):
    """The options of a plan for any engine."""

    context: Annotated[int | None, Parameter(converter=_tokens)] = None
    """Context length of each sequence in tokens, such as 16384 or 16K. [default: 32768, or less if memory is short]"""

    reserve_ram: Size | None = None
    """Memory to leave to other programs, such as "64 GiB". [default: from the configuration]"""

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

    max_tokens: int | None = None
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
