"""The work on one document: summarized whole, or in pieces whose notes are reduced level by level.

    document ──────────────────────────────> summary            a document that fits the context
    document ─> pieces ─> notes ─> reduced ─> summary            one that does not; reduced until the notes fit
                  └─ refused as too long: two pieces replace it in the next stage

Pure: texts and answers in, lines of a batch out. Equal documents and answers make equal lines.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.engine.reasoning import split_reasoning
from tokenmill.errors import UsageError
from tokenmill.jobs.ingest.line import MAX_CUSTOM_ID_LENGTH
from tokenmill.recipes.runner import Answered, Line, chat_line, finish_reason, text_of
from tokenmill.recipes.summarization.chunking import TokenCount, estimate, fits, groups, halved, split
from tokenmill.recipes.summarization.documents import SourceDocument
from tokenmill.recipes.summarization.prompts import KINDS, PromptKind, Prompts

TEMPLATE_TOKENS = 64  # maximum tokens that a chat template adds to two messages
MARGIN = 0.02  # share of the context, because token counts of parts do not add up exactly
ESTIMATED_MARGIN = 0.25  # margin if tokens are estimated from bytes
MIN_DOCUMENT_TOKENS = 64  # minimum useful tokens of a document per prompt
MAX_HALVINGS = 6
MAX_LEVELS = 8
NUMBER_TOKENS = 8  # tokens of the heading of each note
_LONGEST_NAME = MAX_CUSTOM_ID_LENGTH - 64


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Token limits within a context."""

    context: int
    answer: int
    margin: int
    prefixes: Mapping[PromptKind, int]  # tokens of the system messages
    count: TokenCount
    estimated: bool
    overlap: int = 0

    def available(self, kind: PromptKind) -> int:
        """Tokens available for the user's message."""
        return self.context - self.prefixes[kind] - self.answer - self.margin

    def check(self, kind: PromptKind) -> None:
        """Raise UsageError if too few tokens are available."""
        # Reducing needs space for two notes and their headings.
        minimum = 2 * (self.answer + NUMBER_TOKENS) if kind == "reduce" else MIN_DOCUMENT_TOKENS
        if kind == "piece":
            minimum = max(minimum, 2 * self.overlap)  # otherwise a piece would mostly repeat its predecessor
        missing = minimum - self.available(kind)
        if missing > 0:
            needed = -(-(self.context + missing) // 256) * 256
            what = {"document": "a document", "piece": "a piece of a document", "reduce": "notes on two pieces"}[kind]
            raise UsageError(
                f"a context of {self.context:,} tokens is too short: the system message takes {self.prefixes[kind]:,}, "
                f"the summary {self.answer:,}, the margin {self.margin:,}, and {what} at least {minimum:,}",
                hint=f"use --context {needed}, a shorter --digest, or a smaller --max-tokens",
            )


def token_limits(
    context: int, prompts: Prompts, tokens: TokenCount | None, *, answer: int, overlap: int = 0
) -> TokenLimits:
    """The token limits of documents in a context; raises UsageError if they are too small."""
    margin = TEMPLATE_TOKENS + int(context * (ESTIMATED_MARGIN if tokens is None else MARGIN))
    count = tokens or estimate
    prefixes = {kind: count(prompts.system(kind)) for kind in KINDS}
    made = TokenLimits(context, answer, margin, prefixes, count, tokens is None, overlap)
    made.check("document")
    return made


@dataclass(slots=True)
class SummaryPart:
    """A request and its answer."""

    kind: PromptKind
    notes: tuple[str, ...]  # notes to reduce; for a document or a piece, its text
    answer: str | None = None
    halvings: int = 0

    @property
    def message(self) -> str:
        """The user's message of the request."""
        if self.kind != "reduce":
            return self.notes[0]
        return "\n\n".join(f"Part {number}:\n{note}" for number, note in enumerate(self.notes, 1))


@dataclass(frozen=True, slots=True)
class DocumentFailure:
    """Why a document has no summary."""

    code: str
    message: str


@dataclass(slots=True)
class DocumentWork:
    """The state of one document."""

    document: SourceDocument
    file: str
    attempt: int  # number of earlier failures
    parts: list[SummaryPart]
    pieces: int
    level: int = 0
    failure: DocumentFailure | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def summary(self) -> str | None:
        """The final answer; None: not yet."""
        return self.parts[0].answer if len(self.parts) == 1 and self.failure is None else None

    @property
    def over(self) -> bool:
        """Whether the document is finished."""
        return self.failure is not None or self.summary is not None

    def pending(self) -> Iterator[tuple[str, SummaryPart]]:
        """Parts without an answer, under unique names."""
        again = f"~{self.attempt}" if self.attempt else ""
        # Long paths are truncated at the front; the preceding hash keeps them unique.
        name = self.file if len(self.file) <= _LONGEST_NAME else f"{_sum(self.file)}{self.file[-256:]}"
        for number, part in enumerate(self.parts, 1):
            if part.answer is None:
                yield f"{name}#{self.level}.{number}{again}", part

    def take(self, part: SummaryPart, answered: Answered, limits: TokenLimits, *, opened: bool = False) -> None:
        """Record the outcome of a part; `opened`: the model's template opens the reasoning."""
        if answered.body is None:
            self._refused(part, answered, limits)
            return
        finish = finish_reason(answered.body)
        text = split_reasoning(text_of(answered) or "", cut=finish == "length", opened=opened).answer.strip()
        self._count(answered.body.get("usage") or {})
        if not text:
            reason = "--max-tokens was reached before the answer" if finish == "length" else "the model wrote nothing"
            self.failure = self.failure or DocumentFailure("empty", reason)
            return
        part.answer = text
        part.notes = ()
        self.finish_reason = finish

    def _count(self, usage: Mapping[str, Any]) -> None:
        details = usage.get("prompt_tokens_details") or {}
        self.prompt_tokens += usage.get("prompt_tokens") or 0
        self.cached_tokens += details.get("cached_tokens") or 0
        self.completion_tokens += usage.get("completion_tokens") or 0

    def _refused(self, part: SummaryPart, answered: Answered, limits: TokenLimits) -> None:
        if answered.code == "too_long" and part.halvings < MAX_HALVINGS and (two := _in_two(part, limits)):
            index = next(place for place, other in enumerate(self.parts) if other is part)
            self.parts[index : index + 1] = two
            if self.level == 0:
                self.pieces = len(self.parts)
            return
        self.failure = self.failure or DocumentFailure(answered.code or "failed", answered.message or "no answer")

    def advance(self, limits: TokenLimits) -> None:
        """Make the parts of the next level if all parts of this one are answered."""
        if self.over or any(part.answer is None for part in self.parts):
            return
        notes = [part.answer or "" for part in self.parts]
        sizes = [limits.count(note) + NUMBER_TOKENS for note in notes]
        sizes_of_groups = groups(sizes, limits.available("reduce"))
        if self.level >= MAX_LEVELS or len(sizes_of_groups) == len(notes):
            self.failure = DocumentFailure("too_long", f"the notes on {len(notes):,} parts cannot be reduced further")
            return
        self.level += 1
        self.parts = []
        start = 0
        for size in sizes_of_groups:
            self.parts.append(_reduced(notes[start : start + size]))
            start += size


def start_work(document: SourceDocument, file: str, attempt: int, limits: TokenLimits) -> DocumentWork:
    """The initial work on a document."""
    if fits(document.text, limits.available("document"), limits.count):
        return DocumentWork(document, file, attempt, [SummaryPart("document", (document.text,))], 1)
    limits.check("piece")
    limits.check("reduce")
    parts = _pieces(split(document.text, limits.available("piece"), limits.count, overlap=limits.overlap), 0)
    return DocumentWork(document, file, attempt, parts, len(parts))


def line_of(name: str, part: SummaryPart, prompts: Prompts, sampling: Mapping[str, Any]) -> Line:
    """The batch line that requests a part."""
    system = {"role": "system", "content": prompts.system(part.kind)}
    messages = [system, {"role": "user", "content": part.message}]
    return chat_line(name, messages if system["content"] else messages[1:], **sampling)


def _sum(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _pieces(texts: Sequence[str], halvings: int) -> list[SummaryPart]:
    return [SummaryPart("piece", (text,), halvings=halvings) for text in texts if text.strip()]


def _reduced(notes: Sequence[str], halvings: int = 0) -> SummaryPart:
    """A part that combines notes; a single note needs none."""
    return (
        SummaryPart("reduce", (), answer=notes[0])
        if len(notes) == 1
        else SummaryPart("reduce", tuple(notes), None, halvings)
    )


def _in_two(part: SummaryPart, limits: TokenLimits) -> list[SummaryPart]:
    """Shorter parts that replace a part; empty if it cannot be split."""
    halvings = part.halvings + 1
    if part.kind != "reduce":
        texts = halved(part.notes[0], limits.count)
        return _pieces(texts, halvings) if len(texts) > 1 else []
    if len(part.notes) < 3:
        return []
    middle = (len(part.notes) + 1) // 2
    return [_reduced(part.notes[:middle], halvings), _reduced(part.notes[middle:], halvings)]
