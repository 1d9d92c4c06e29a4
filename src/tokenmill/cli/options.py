"""The options of plans and engines as the command line spells them; `api/options.py` says what they mean."""

import json
import time
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from cyclopts import Parameter

from tokenmill.api import options as api
from tokenmill.api.options import engine_name, known_engines
from tokenmill.api.run_options import check_defaults
from tokenmill.errors import UsageError
from tokenmill.planner.goal import DialectName
from tokenmill.units import MIB, parse_bytes


def _size(_type: Any, tokens: Any) -> int:
    try:
        return parse_bytes(tokens[0].value)
    except ValueError as error:
        raise UsageError(str(error)) from error


Size = Annotated[int, Parameter(converter=_size)]


def _planned_engine(_type: Any, tokens: Any) -> str:
    asked = str(tokens[0].value)
    name = engine_name(asked)
    if name not in api.ENGINES and name not in get_args(DialectName):
        raise UsageError(f"unknown engine {asked!r}", hint=f"known: {known_engines()}")
    return name


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Knobs(api.PlanOptions):
    """What the user wants of a plan, whatever engine it is for."""

    reserve_ram: Size | None = None
    """Memory to keep for other work, such as "64 GiB"; default: the configuration's."""

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


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class EngineFlags(Knobs, api.EngineOptions):
    """What engine to start, and how."""

    warm: Annotated[bool | None, Parameter(negative="--no-warm")] = None
    """Fill the page cache and decode once before the engine counts as ready; default: yes."""

    point: Annotated[bool, Parameter(negative="--no-point")] = True
    """Use the operating point that tokenmill tune found, for what is not set here; default: yes."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class GoalOptions(Knobs):
    """What the user wants of a plan."""

    engine: Annotated[str | None, Parameter(converter=_planned_engine)] = None
    """native (llama.cpp in a worker process, what run and serve start by default), llama-server, ik_llama, vllm, or an
    older version: llama.cpp-2025 (stores K and V of a latent cache apart), ik_llama-2025, ..."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class BodyOptions:
    """Values for jobs whose lines do not say."""

    max_tokens: int | None = None
    """Tokens of an answer at most, for lines that do not say."""

    temperature: float | None = None
    """0 always takes the likeliest token; for lines that do not say."""

    top_p: float | None = None
    """Draw from the likeliest tokens that together have this probability; for lines that do not say."""

    seed: int | None = None
    """Of the draws, for lines that do not say."""

    body: str | None = None
    """More of the same as a JSON object with keys of OpenAI's bodies, such as '{"response_format": ...}'."""

    def defaults(self) -> dict[str, Any]:
        """As keys of a body; UsageError where one is wrong."""
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
    """A time for people."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))
