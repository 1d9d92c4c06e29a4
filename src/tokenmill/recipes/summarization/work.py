"""One document on its way to a summary: whole, or in pieces whose notes are reduced to one, level by level.

    document ──────────────────────────────> summary            it fits the context
    document ─> pieces ─> notes ─> reduced ─> summary            it does not; reduced again while notes do not fit
                  └─ too long after all: two pieces in its place, in the next stage

Pure: texts and answers in, lines of a batch out. The same document and the same answers make the same lines.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.errors import UsageError
from tokenmill.jobs.line import LONGEST_CUSTOM_ID
from tokenmill.recipes.reasoning import part as parted
from tokenmill.recipes.runner import Answered, Line, chat_line, text_of
from tokenmill.recipes.summarization.chunking import TokenCount, estimate, fits, groups, halved, split
from tokenmill.recipes.summarization.documents import SourceDocument
from tokenmill.recipes.summarization.prompts import KINDS, PromptKind, Prompts

TEMPLATE_TOKENS = 64  # what a chat template puts around two messages, at most
MARGIN = 0.02  # of the context: tokens of parts do not quite add up
ESTIMATED_MARGIN = 0.25  # where 4 bytes are taken for a token
LEAST_ROOM = 64  # tokens of a document that are worth a prompt
MOST_HALVINGS = 6
MOST_LEVELS = 8
NUMBER_TOKENS = 8  # of the line above each note
_LONGEST_NAME = LONGEST_CUSTOM_ID - 64


@dataclass(frozen=True, slots=True)
class Rooms:
    """What has room in a context, in tokens."""

    context: int
    answer: int
    margin: int
    heads: Mapping[PromptKind, int]
    count: TokenCount
    estimated: bool
    overlap: int = 0

    def room(self, kind: PromptKind) -> int:
        """For the user's message."""
        return self.context - self.heads[kind] - self.answer - self.margin

    def check(self, kind: PromptKind) -> None:
        """UsageError where there is too little of it."""
        # Reducing makes progress only where two notes and their numbers have room.
        least = 2 * (self.answer + NUMBER_TOKENS) if kind == "reduce" else LEAST_ROOM
        if kind == "piece":
            least = max(least, 2 * self.overlap)  # a piece that is mostly the one before says little
        short = least - self.room(kind)
        if short > 0:
            what = {"document": "a document", "piece": "a piece of a document", "reduce": "notes on two pieces"}[kind]
            raise UsageError(
                f"a context of {self.context:,} tokens is too short: the head takes {self.heads[kind]:,}, the summary "
                f"{self.answer:,}, margins {self.margin:,}, and {what} at least {least:,}",
                hint=f"--context {-(-(self.context + short) // 256) * 256}, a shorter --digest, or fewer --max-tokens",
            )


def rooms(context: int, prompts: Prompts, tokens: TokenCount | None, *, answer: int, overlap: int = 0) -> Rooms:
    """What is left of a context for documents; UsageError where that is too little."""
    margin = TEMPLATE_TOKENS + int(context * (ESTIMATED_MARGIN if tokens is None else MARGIN))
    count = tokens or estimate
    heads = {kind: count(prompts.system(kind)) for kind in KINDS}
    made = Rooms(context, answer, margin, heads, count, tokens is None, overlap)
    made.check("document")
    return made


@dataclass(slots=True)
class SummaryPart:
    """Something to be answered, and the answer when it is there."""

    kind: PromptKind
    notes: tuple[str, ...]  # to be reduced; of a document or a piece the one text
    answer: str | None = None
    halvings: int = 0

    @property
    def message(self) -> str:
        """As the user's."""
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
    """A document that is worked on."""

    document: SourceDocument
    file: str
    attempt: int  # how often it failed before
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
        """The one answer that is left; None: not yet."""
        return self.parts[0].answer if len(self.parts) == 1 and self.failure is None else None

    @property
    def over(self) -> bool:
        """Whether it needs no more."""
        return self.failure is not None or self.summary is not None

    def pending(self) -> Iterator[tuple[str, SummaryPart]]:
        """Parts without an answer, under names that no other document's have."""
        again = f"~{self.attempt}" if self.attempt else ""
        # A long path is told by its end, which the sum in front of it makes different from others.
        name = self.file if len(self.file) <= _LONGEST_NAME else f"{_sum(self.file)}{self.file[-256:]}"
        for number, part in enumerate(self.parts, 1):
            if part.answer is None:
                yield f"{name}#{self.level}.{number}{again}", part

    def take(self, part: SummaryPart, answered: Answered, rooms: Rooms, *, opened: bool = False) -> None:
        """Note what became of a part; `opened`: the model's template begins its thinking."""
        if answered.body is None:
            self._refused(part, answered, rooms)
            return
        finish = finish_of(answered)
        text = parted(text_of(answered) or "", cut=finish == "length", opened=opened).answer.strip()
        self._count(answered.body.get("usage") or {})
        if not text:
            why = "--max-tokens ended before an answer began" if finish == "length" else "the model wrote nothing"
            self.failure = self.failure or DocumentFailure("empty", why)
            return
        part.answer = text
        part.notes = ()
        self.finish_reason = finish

    def _count(self, usage: Mapping[str, Any]) -> None:
        details = usage.get("prompt_tokens_details") or {}
        self.prompt_tokens += usage.get("prompt_tokens") or 0
        self.cached_tokens += details.get("cached_tokens") or 0
        self.completion_tokens += usage.get("completion_tokens") or 0

    def _refused(self, part: SummaryPart, answered: Answered, rooms: Rooms) -> None:
        if answered.code == "too_long" and part.halvings < MOST_HALVINGS and (two := _in_two(part, rooms)):
            index = next(place for place, other in enumerate(self.parts) if other is part)
            self.parts[index : index + 1] = two
            if self.level == 0:
                self.pieces = len(self.parts)
            return
        self.failure = self.failure or DocumentFailure(answered.code or "failed", answered.message or "no answer")

    def advance(self, rooms: Rooms) -> None:
        """When every part has its answer and there are several: make the parts of the next level."""
        if self.over or any(part.answer is None for part in self.parts):
            return
        notes = [part.answer or "" for part in self.parts]
        sizes = [rooms.count(note) + NUMBER_TOKENS for note in notes]
        together = groups(sizes, rooms.room("reduce"))
        if self.level >= MOST_LEVELS or len(together) == len(notes):
            self.failure = DocumentFailure(
                "too_long", f"the notes on {len(notes):,} parts could not be reduced any further"
            )
            return
        self.level += 1
        self.parts = []
        start = 0
        for size in together:
            self.parts.append(_reduced(notes[start : start + size]))
            start += size


def begun(document: SourceDocument, file: str, attempt: int, rooms: Rooms) -> DocumentWork:
    """A document's work before the first stage."""
    if fits(document.text, rooms.room("document"), rooms.count):
        return DocumentWork(document, file, attempt, [SummaryPart("document", (document.text,))], 1)
    rooms.check("piece")
    rooms.check("reduce")
    parts = _pieces(split(document.text, rooms.room("piece"), rooms.count, overlap=rooms.overlap), 0)
    return DocumentWork(document, file, attempt, parts, len(parts))


def line_of(name: str, part: SummaryPart, prompts: Prompts, sampling: Mapping[str, Any]) -> Line:
    """The line of a batch that has a part answered."""
    system = {"role": "system", "content": prompts.system(part.kind)}
    messages = [system, {"role": "user", "content": part.message}]
    return chat_line(name, messages if system["content"] else messages[1:], **sampling)


def finish_of(answered: Answered) -> str | None:
    """Why an answer ended."""
    choices = answered.body.get("choices") if answered.body else None
    reason = choices[0].get("finish_reason") if choices else None
    return reason if isinstance(reason, str) else None


def _sum(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _pieces(texts: Sequence[str], halvings: int) -> list[SummaryPart]:
    return [SummaryPart("piece", (text,), halvings=halvings) for text in texts if text.strip()]


def _reduced(notes: Sequence[str], halvings: int = 0) -> SummaryPart:
    """Notes to be made one; a single one is that already."""
    return (
        SummaryPart("reduce", (), answer=notes[0])
        if len(notes) == 1
        else SummaryPart("reduce", tuple(notes), None, halvings)
    )


def _in_two(part: SummaryPart, rooms: Rooms) -> list[SummaryPart]:
    """Shorter parts instead of one; none: it cannot be cut."""
    halvings = part.halvings + 1
    if part.kind != "reduce":
        texts = halved(part.notes[0], rooms.count)
        return _pieces(texts, halvings) if len(texts) > 1 else []
    if len(part.notes) < 3:
        return []
    middle = (len(part.notes) + 1) // 2
    return [_reduced(part.notes[:middle], halvings), _reduced(part.notes[middle:], halvings)]
