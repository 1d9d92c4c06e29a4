"""The interface between a recipe and the runner of its batches.

A recipe makes lines of OpenAI's batch format, gives them to a `BatchRunner` stage by stage, and makes rows of the
answers. It must make the same lines from the same input and answers: that is how it resumes after a kill, finds a batch
that runs elsewhere, and never pays for an answer twice. A runner works on a local store and engine, or on a gateway
over HTTP; recipes do not know which.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

from tokenmill.storage.json_text import compact_json

Line = Mapping[str, Any]
"""One job: custom_id, method, url, body; `chat_line` makes one."""

RecipeEnd = Literal["finished", "tokens", "hours", "stopped", "cancelled"]
"""Why a stage is over: all of it is done; a limit of the run, as in `Budget`; somebody asked; it was cancelled."""


@dataclass(frozen=True, slots=True)
class AnswerOrigin:
    """Who answers, for the provenance of rows."""

    model: str  # as people call it
    model_id: str  # of its very bytes where that is known
    engine: str  # native, llama-server, vllm, gateway, ...
    build: str  # of the engine
    context: int | None = None  # tokens of one sequence; None: not known


@dataclass(frozen=True, slots=True)
class RecipeCost:
    """What a run has cost so far; answers that were there before cost nothing."""

    answers: int = 0  # computed
    reused: int = 0  # answers that were there
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens, not computed again
    completion_tokens: int = 0
    seconds: float = 0.0  # of work, loading not counted

    @property
    def tokens(self) -> int:
        """What a budget counts: prompt tokens that were computed and tokens that were written."""
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
    """What one run may use; None: as much as it takes. The next run has it anew."""

    tokens: int | None = None  # as `Spent.tokens`
    seconds: float | None = None


class Answered(NamedTuple):
    """What became of a line."""

    custom_id: str
    body: Mapping[str, Any] | None  # a chat completion; None: there is no answer
    code: str | None = None  # why not
    message: str | None = None


class FinishedStage(Protocol):
    """A stage that is over."""

    @property
    def end(self) -> RecipeEnd:
        """Why."""
        ...

    @property
    def total(self) -> int:
        """Lines of the stage."""
        ...

    def answers(self) -> Iterator[Answered]:
        """Every line that has its outcome, in the order of the lines; may be asked for again."""
        ...


class BatchRunner(Protocol):
    """Works batches through. After a stage whose end is not "finished", a recipe writes what it has and returns."""

    @property
    def origin(self) -> AnswerOrigin:
        """Who answers."""
        ...

    @property
    def spent(self) -> RecipeCost:
        """By this run, all stages together."""
        ...

    async def run(self, stage: str, lines: Iterable[Line]) -> FinishedStage:
        """Have these lines answered; `stage` is for people ("write 1"). Lines that exist as a batch are that batch."""
        ...


@dataclass(frozen=True, slots=True)
class StageProspect:
    """One stage before anything has run, for a forecast."""

    stage: str
    jobs: int
    lines: tuple[Line, ...] = ()  # all of them, or a fair sample; none: `prompt_bytes` says it
    prompt_bytes: int | None = None  # of all jobs, where lines are not known yet
    shared_bytes: int = 0  # of each prompt, the head that all have; with `prompt_bytes`
    output_tokens: int = 0  # of each answer at most
    assumed: str | None = None  # what was guessed, in words; None: nothing


@dataclass(frozen=True, slots=True)
class Prospect:
    """A recipe before anything has run: what --dry-run makes hours and costs of."""

    stages: tuple[StageProspect, ...]
    rows: int | None = None  # that it is to come to; None: not known
    notes: tuple[str, ...] = ()


def chat_line(custom_id: str, messages: Iterable[Mapping[str, str]], **body: Any) -> dict[str, Any]:
    """A line of a batch file; `body` has max_tokens, temperature, response_format, ...; None is left out."""
    given = {key: value for key, value in body.items() if value is not None}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [dict(message) for message in messages], **given},
    }


def made_by(answer: Answered, origin: AnswerOrigin) -> AnswerOrigin:
    """Who wrote an answer: one that was there before may be another engine's or build's, of the same model."""
    said = answer.body.get("system_fingerprint") if answer.body else None
    engine, known, build = said.partition(" ") if isinstance(said, str) else ("", "", "")
    return replace(origin, engine=engine, build=build) if known else origin


def text_of(answer: Answered) -> str | None:
    """What the model wrote; None: there is no answer, or it is not text."""
    choices = answer.body.get("choices") if answer.body else None
    message = choices[0].get("message") if choices else None
    content = message.get("content") if message else None
    return content if isinstance(content, str) else None


def line_bytes(line: Line) -> bytes:
    """A line as it is stored. Equal lines give equal bytes, which is how an existing batch is found."""
    try:
        return compact_json(line).encode() + b"\n"
    except UnicodeEncodeError:  # half a character: the line's own outcome says so
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"
