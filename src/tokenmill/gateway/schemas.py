"""Types of the gateway's own responses; the schemas of /openapi.json are generated from them.

Types of chats and completions are in `jobs.openai.answers`.
"""

from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta

_Count = Annotated[int, Meta(ge=0)]
_Bytes = Annotated[int, Meta(ge=0)] | None
_Rate = Annotated[float | None, Meta(description="Average over the last few seconds; null: unknown.")]
_Time = Annotated[float, Meta(description="Unix time in seconds.")]
Health = Literal["ok", "degraded", "down", "stopping"]


# ---- errors, health, models, embeddings


class ErrorDetail(TypedDict):
    """Message, code and cause of an error."""

    message: str
    type: str
    param: Annotated[str | None, Meta(description="The invalid key of the request.")]
    code: Annotated[str | None, Meta(description="Stable identifier of the error, for programs.")]
    source: Annotated[Literal["request", "gateway", "engine"], Meta(description="What caused the error.")]


class Error(TypedDict):
    """OpenAI's error object."""

    error: ErrorDetail


class AnthropicErrorDetail(TypedDict):
    """Type and message of an error."""

    type: str
    message: str
    code: Annotated[str, Meta(description="Stable identifier of the error, for programs.")]


class AnthropicError(TypedDict):
    """Anthropic's error object."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class HealthReport(TypedDict):
    """The state of the gateway and of every engine."""

    status: Health
    engines: dict[str, str]


class ModelObject(TypedDict):
    """A name under which a model is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: Annotated[int | None, Meta(description="Maximum tokens of one sequence.")]
    engines: Annotated[list[str], Meta(description="Engines in order of preference.")]


class ModelList(TypedDict):
    """Every name of every model."""

    object: Literal["list"]
    data: list[ModelObject]


# ---- /api/status


class LaneCounts(TypedDict):
    """Slots of an engine: total, busy, and requests by priority class."""

    total: int | None
    busy: _Count
    waiting: _Count
    interactive: _Count
    batch: _Count


class SlotActivity(TypedDict):
    """Progress of one sequence."""

    id: Any
    label: str | None
    priority: Literal["interactive", "batch"]
    doing: Literal["waiting", "prompt", "answer"]
    prompt_tokens: _Count
    ready_tokens: _Count
    reused_tokens: _Count
    generated_tokens: _Count


class RatesObject(TypedDict):
    """Throughput of an engine."""

    generated_tok_s: _Rate
    prompt_tok_s: _Rate
    reused_tok_s: _Rate


class EngineStatusObject(TypedDict):
    """One engine."""

    name: str
    state: str
    detail: str | None
    kind: str
    model: str
    model_id: Annotated[str, Meta(description="Hash of the model's bytes.")]
    build: str
    context: int | None
    lanes: LaneCounts
    at_work: Annotated[
        list[SlotActivity] | None,
        Meta(description="Running sequences; null: the engine does not report them."),
    ]
    counters: Annotated[dict[str, Any] | None, Meta(description="Since the engine started; null: not reported.")]
    rates: RatesObject


class MemoryPart(TypedDict):
    """Memory of one component of an engine."""

    engine: str
    item: str
    predicted_bytes: _Bytes
    measured_bytes: _Bytes
    source: Annotated[Literal["engine", "process", "driver"], Meta(description="Where the measurement comes from.")]
    explanation: str | None


class MemoryObject(TypedDict):
    """One memory of the machine."""

    tier: Annotated[str, Meta(description="gpu0, ...; host: all memory that is not a GPU's.")]
    capacity_bytes: _Bytes
    free_bytes: _Bytes
    other_bytes: Annotated[_Bytes, Meta(description="Used by other programs.")]
    parts: list[MemoryPart]
    sums: Annotated[
        list[MemoryPart],
        Meta(description="Totals of the engine processes as reported by the system: mapped, own, total."),
    ]


class PrefixSegment(TypedDict):
    """A segment of the prefix tree."""

    depth: _Count
    start: _Count
    tokens: _Count
    hits: _Count
    pinned: bool
    locked: bool
    last_used: _Count
    beginning: str
    digest: str | None


class EnginePrefixes(TypedDict):
    """The prefixes in an engine's cache."""

    engine: str
    total: Annotated[int, Meta(ge=0, description="Number of segments; the list may be shorter.")]
    segments: Annotated[
        list[PrefixSegment],
        Meta(description="In depth-first order: the parent of a segment is the last shallower one before it."),
    ]


class TokenCounts(TypedDict):
    """Tokens of single requests since the gateway started; batches are not included."""

    prompt: _Count
    reused: _Count
    generated: _Count
    answers: _Count


class Quantiles(TypedDict):
    """Median and 95th percentile over the last interactive requests."""

    median: _Rate
    p95: _Rate
    of: _Count


class Latencies(TypedDict):
    """Latencies of interactive requests."""

    first_token_s: Quantiles
    token_s: Quantiles


class CacheMiss(TypedDict):
    """A prompt that was recomputed although it had been computed before."""

    when_s: _Time
    backend: str
    lane: str
    prompt_tokens: _Count
    cached_tokens: int | None
    words: str


class ErrorRecord(TypedDict):
    """A request that failed."""

    when_s: _Time
    id: str
    route: str
    status: int
    code: str


class Notice(TypedDict):
    """A change of an engine's state."""

    when_s: _Time
    backend: str
    state: str
    words: str | None


class StatusObject(TypedDict):
    """The gateway, its engines and its memory."""

    status: Health
    version: str
    url: str
    now_s: _Time
    started_s: _Time
    models: list[str]
    engines: list[EngineStatusObject]
    memory: list[MemoryObject]
    tokens: TokenCounts
    times: Latencies
    batches: Annotated[dict[str, _Count] | None, Meta(description="Number of batches by status.")]
    misses: list[CacheMiss]
    errors: list[ErrorRecord]
    notices: list[Notice]


class StatusWithPrefixes(StatusObject):
    """The answer of /api/status."""

    prefixes: list[EnginePrefixes]
