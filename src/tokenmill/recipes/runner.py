"""The interface between a recipe and the runner of its batches.

A recipe makes lines of OpenAI's batch format, passes them to a `BatchRunner` stage by stage, and makes rows of the
answers. Equal input and answers must give equal lines: that lets it resume after a kill, join a batch that runs
elsewhere, and never compute an answer twice. Runners use a local store and engine, or a gateway over HTTP.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

from tokenmill.storage.json_text import compact_json

Line = Mapping[str, Any]
"""One job: custom_id, method, url, body; `chat_line` makes one."""

RecipeEnd = Literal["finished", "tokens", "hours", "stopped", "cancelled"]
"""Why a stage ended: finished, a limit of the `Budget` was reached, stopped by the user, or its batch was cancelled."""


@dataclass(frozen=True, slots=True)
class AnswerOrigin:
    """The model and engine that answer; part of the provenance of rows."""

    model: str  # display name
    model_id: str  # identity of its bytes if known
    engine: str  # native, llama-server, vllm, gateway, ...
    build: str  # of the engine
    context: int | None = None  # tokens per sequence; None: unknown


@dataclass(frozen=True, slots=True)
class RecipeCost:
    """Cost of a run so far; reused answers are free."""

    answers: int = 0  # computed answers
    reused: int = 0  # answers taken from the store
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens from the cache
    completion_tokens: int = 0
    seconds: float = 0.0  # without loading

    @property
    def tokens(self) -> int:
        """Tokens that count against a budget: computed prompt tokens and output tokens."""
        return self.prompt_tokens - self.cached_tokens + self.completion_tokens

    def __add__(self, other: "RecipeCost") -> "RecipeCost":
        return RecipeCost(
            self.answers + other.answers,
            self.reused + other.reused,
            self.failed + other.failed,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one run; None: unlimited. Every run has the whole budget."""

    tokens: int | None = None  # compared with `RecipeCost.tokens`
    seconds: float | None = None


class Answered(NamedTuple):
    """Outcome of a line."""

    custom_id: str
    body: Mapping[str, Any] | None  # a chat completion; None: no answer
    code: str | None = None  # error code
    message: str | None = None


class FinishedStage(Protocol):
    """A finished stage."""

    @property
    def end(self) -> RecipeEnd:
        """Why the stage ended."""
        ...

    @property
    def total(self) -> int:
        """Number of lines of the stage."""
        ...

    def answers(self) -> Iterator[Answered]:
        """Every line with an outcome, in line order; may be called repeatedly."""
        ...


class BatchRunner(Protocol):
    """Runs the stages of a recipe as batches.

    After a stage that did not end as "finished", the recipe writes its rows and returns.
    """

    @property
    def origin(self) -> AnswerOrigin:
        """The model and engine that answer."""
        ...

    @property
    def spent(self) -> RecipeCost:
        """Cost of this run over all stages."""
        ...

    async def run(self, stage: str, lines: Iterable[Line]) -> FinishedStage:
        """Run the lines and wait; `stage` is a display name ("write 1"). A batch with the same lines is resumed."""
        ...


@dataclass(frozen=True, slots=True)
class StageProspect:
    """One stage of a forecast."""

    stage: str
    jobs: int
    lines: tuple[Line, ...] = ()  # all lines or a representative sample; empty: `prompt_bytes` is given
    prompt_bytes: int | None = None  # total of all jobs, if lines are unknown
    shared_bytes: int = 0  # bytes of the prefix shared by all prompts; with `prompt_bytes`
    output_tokens: int = 0  # maximum per answer
    assumed: str | None = None  # assumption behind these numbers, for the user; None: nothing is assumed


@dataclass(frozen=True, slots=True)
class Prospect:
    """A recipe's stages for --dry-run."""

    stages: tuple[StageProspect, ...]
    rows: int | None = None  # target number of rows; None: unknown
    notes: tuple[str, ...] = ()


def chat_line(custom_id: str, messages: Iterable[Mapping[str, str]], **body: Any) -> dict[str, Any]:
    """Make a line of a batch file; `body` has max_tokens, temperature, response_format, ...; None is omitted."""
    given = {key: value for key, value in body.items() if value is not None}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [dict(message) for message in messages], **given},
    }


def origin_of_answer(answer: Answered, origin: AnswerOrigin) -> AnswerOrigin:
    """The origin of an answer; a reused one may come from another engine or build with the same model."""
    fingerprint = answer.body.get("system_fingerprint") if answer.body else None
    engine, known, build = fingerprint.partition(" ") if isinstance(fingerprint, str) else ("", "", "")
    return replace(origin, engine=engine, build=build) if known else origin


def text_of(answer: Answered) -> str | None:
    """The text of a chat completion; None if it has no text."""
    choices = answer.body.get("choices") if answer.body else None
    message = choices[0].get("message") if choices else None
    content = message.get("content") if message else None
    return content if isinstance(content, str) else None


def finish_reason(body: Mapping[str, Any] | None) -> str | None:
    """The finish reason of a chat completion; None if it has none."""
    choices = body.get("choices") if body else None
    reason = choices[0].get("finish_reason") if choices else None
    return reason if isinstance(reason, str) else None


def line_bytes(line: Line) -> bytes:
    """Serialize a line. Equal lines give equal bytes, which identifies existing batches."""
    try:
        return compact_json(line).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate: the line will fail validation
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"
