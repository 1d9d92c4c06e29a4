"""Explains why less of a prompt was reused than expected, from what the engine and the scheduler report.

A miss is determined from the engine's count of cached tokens, never from timing. Differences within `tolerance_tokens`
are ignored: a tokenizer may merge the last characters of a prefix with what follows, caches keep whole blocks, and the
expected number is estimated from bytes. Does not influence the order of jobs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tokenmill.engine import tool_calls
from tokenmill.engine.engine import Engine, Usage
from tokenmill.errors import EngineError, RequestRefused
from tokenmill.jobs.lint.differences import visible
from tokenmill.jobs.openai.call import Call
from tokenmill.jobs.scheduler.decisions import Dispatch
from tokenmill.jobs.scheduler.prefix_groups import Minimum, common_length
from tokenmill.jobs.scheduler.shape import Reuse
from tokenmill.units import number_of

SLOT_SIMILARITY = 0.1  # llama-server's default of --slot-prompt-similarity: share of a prompt that a slot must have
BORDER_TOKENS = 16  # tokens that may be lost where a prefix ends
ESTIMATE_SHARE = 0.1  # of the expected tokens, because they are estimated from bytes
_SHOWN = 30  # characters on each side of a difference
_EXAMPLES = 3  # kept per cause

Cause = Literal[
    "engine restarted", "cannot reuse", "head changed", "slot taken", "below similarity", "evicted", "not told"
]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Observations about one answer; None or empty: unknown."""

    reuse: Reuse
    prompt: bytes | None = None  # canonical prompt of the job
    like: bytes | None = None  # canonical prompt of the job whose prefix it should have found
    lane: int | None = None  # slot that served it
    restarted: bool = False  # the engine restarted after it had computed the prefix
    slot_taken: bool = False  # another client used the slot in between
    evicted_tokens: int | None = None  # evicted by the engine since the prefix was computed
    cells_between: int | None = None  # tokens that other jobs needed since then ...
    cells_total: int | None = None  # ... and the engine's capacity
    block_tokens: int = 1  # reuse comes in whole blocks
    similarity: float | None = None  # of a server that chooses slots itself: SLOT_SIMILARITY unless configured
    notes: tuple[str, ...] = ()  # from the engine's capabilities and its answer


@dataclass(frozen=True, slots=True)
class Miss:
    """A prompt that was computed although it should have been cached."""

    job: int
    cause: Cause
    words: str
    expected_tokens: int
    cached_tokens: int
    at_byte: int | None = None  # where the prefix changed

    @property
    def lost_tokens(self) -> int:
        """Tokens computed again."""
        return self.expected_tokens - self.cached_tokens


def expected_tokens(sent: Dispatch, usage: Usage, prompt_bytes: int, evidence: Evidence) -> int:
    """Tokens that should have been cached, by this prompt's own tokens per byte; never the last one.

    The scheduler's expectation from prefix keys is a minimum; if both prompts are available, they are compared.
    """
    shared = sent.expected_bytes
    if evidence.prompt is not None and evidence.like is not None:
        shared = max(shared, common_length(evidence.prompt, evidence.like))
    share = min(1.0, shared / prompt_bytes) if prompt_bytes else 0.0
    return min(int(share * usage.prompt_tokens), max(0, usage.prompt_tokens - 1))


def tolerance_tokens(expected: int, block_tokens: int = 1) -> int:
    """Maximum shortfall of cached tokens that does not count as a miss."""
    return BORDER_TOKENS + block_tokens - 1 + int(ESTIMATE_SHARE * expected)


def explain(sent: Dispatch, usage: Usage, prompt_bytes: int, evidence: Evidence) -> Miss | None:
    """The miss, if any; None also if the engine does not report cached tokens."""
    cached = usage.cached_tokens
    expected = expected_tokens(sent, usage, prompt_bytes, evidence)
    if cached is None or cached >= expected - tolerance_tokens(expected, evidence.block_tokens):
        return None
    cause, words, at_byte = _cause(sent, usage, evidence, expected)
    return Miss(sent.job, cause, words, expected, cached, at_byte)


def _cause(sent: Dispatch, usage: Usage, evidence: Evidence, expected: int) -> tuple[Cause, str, int | None]:
    """The first cause that applies, in order of certainty."""
    if evidence.restarted:
        return "engine restarted", "the engine was restarted in between, and a new one has computed nothing yet", None
    if evidence.reuse == "none":
        return "cannot reuse", _with("the engine cannot reuse this model's prompts", evidence.notes), None
    changed = _changed(sent, evidence)
    if changed is not None:
        return changed
    causes: tuple[tuple[Cause, str | None], ...] = (
        ("slot taken", _slot_taken(sent, evidence)),
        ("below similarity", _below_similarity(sent, usage, evidence, expected)),
        ("evicted", _evicted(evidence)),
        ("not told", _untold(usage, evidence)),
    )
    cause, words = next((cause, words) for cause, words in causes if words is not None)
    return cause, words, None


def _changed(sent: Dispatch, evidence: Evidence) -> tuple[Cause, str, int] | None:
    prompt = evidence.prompt
    like = evidence.like
    if prompt is None or like is None:
        return None
    at = common_length(prompt, like)
    if at >= sent.expected_bytes or at == len(prompt):
        return None
    shown = difference(prompt, like, at)
    return "head changed", f"the head changed at byte {at}:\n  was {shown[1]}\n  is  {shown[0]}", at


def difference(one: bytes, other: bytes, at: int) -> tuple[str, str]:
    """Both texts around a byte, 30 characters to each side, on one line each with control characters visible."""
    return _around(one, at), _around(other, at)


def _around(text: bytes, at: int) -> str:
    """Widen to character boundaries, so that a difference inside a character shows the whole character."""
    while 0 < at < len(text) and text[at] & 0xC0 == 0x80:
        at -= 1
    before = text[max(0, at - 4 * _SHOWN) : at].decode(errors="replace")[-_SHOWN:]
    after = text[at : at + 4 * _SHOWN].decode(errors="replace")[:_SHOWN]
    return f"{''.join(map(visible, before))}▸{''.join(map(visible, after))}"


def _slot_taken(sent: Dispatch, evidence: Evidence) -> str | None:
    if sent.lane is not None and evidence.lane not in (None, sent.lane):
        return f"it was sent to slot {sent.lane} and served by slot {evidence.lane}: the slot was busy"
    if sent.lane is not None and evidence.slot_taken:
        return f"another request used slot {sent.lane} in between and left its own prompt there"
    return None


def _below_similarity(sent: Dispatch, usage: Usage, evidence: Evidence, expected: int) -> str | None:
    """Without a requested slot, llama-server only considers slots that hold more than a share of the prompt."""
    threshold = evidence.similarity
    if evidence.reuse == "none" or sent.lane is not None or not threshold or not usage.prompt_tokens:
        return None
    similar = expected / usage.prompt_tokens
    if similar > threshold:
        return None
    return (
        f"the shared prefix is {similar:.0%} of the prompt, and the server only looks for a slot that has more than "
        f"{threshold:.0%} (--slot-prompt-similarity)"
    )


def _evicted(evidence: Evidence) -> str | None:
    if evidence.evicted_tokens:
        return f"the engine dropped {evidence.evicted_tokens} tokens in between to make room"
    between = evidence.cells_between
    total = evidence.cells_total
    if between is not None and total is not None and between > total:
        return f"other jobs needed {between} tokens of room in between, and the engine has {total}"
    return None


def _untold(usage: Usage, evidence: Evidence) -> str:
    """Where reuse ended; the template may have added text that is not in the jobs."""
    words = "the engine does not say why"
    if evidence.prompt and usage.prompt_tokens and usage.cached_tokens:
        at = int(len(evidence.prompt) * usage.cached_tokens / usage.prompt_tokens)
        words += f"; it reused up to about byte {at}: {_around(evidence.prompt, at)}"
    elif usage.cached_tokens == 0:
        words += "; it reused nothing, so the prompts may differ in what the chat template writes first"
    return _with(words, evidence.notes)


def _with(words: str, notes: Sequence[str]) -> str:
    return f"{words} ({'; '.join(notes)})" if notes else words


@dataclass(slots=True)
class Tallied:
    """All misses of one cause."""

    cause: Cause
    jobs: int = 0
    lost_tokens: int = 0
    examples: list[Miss] = field(default_factory=list)


class Misses:
    """Lost tokens by cause, with the first examples of each."""

    def __init__(self) -> None:
        self._by_cause: dict[Cause, Tallied] = {}

    def add(self, miss: Miss) -> None:
        """Count a miss."""
        tallied = self._by_cause.setdefault(miss.cause, Tallied(miss.cause))
        tallied.jobs += 1
        tallied.lost_tokens += miss.lost_tokens
        if len(tallied.examples) < _EXAMPLES:
            tallied.examples.append(miss)

    def include(self, other: "Misses") -> None:
        """Add another tally."""
        for theirs in other.by_cost():
            tallied = self._by_cause.setdefault(theirs.cause, Tallied(theirs.cause))
            tallied.jobs += theirs.jobs
            tallied.lost_tokens += theirs.lost_tokens
            tallied.examples += theirs.examples[: _EXAMPLES - len(tallied.examples)]

    @property
    def lost_tokens(self) -> int:
        """Prompt tokens computed again."""
        return sum(tallied.lost_tokens for tallied in self._by_cause.values())

    def by_cost(self) -> list[Tallied]:
        """Causes by lost tokens, highest first."""
        return sorted(self._by_cause.values(), key=lambda tallied: -tallied.lost_tokens)

    def lines(self) -> list[str]:
        """One summary line per cause."""
        return [
            f"{tallied.cause}: {number_of(tallied.lost_tokens, 'prompt token')} computed again in "
            f"{number_of(tallied.jobs, 'job')}; {tallied.examples[0].words}"
            for tallied in self.by_cost()
        ]


MOST_JOBS = 1000  # prompts that are tokenized again at the end of a run, at most
MOST_TOKENS = 500_000


class Reckoned:
    """Minimum tokens estimated per job: prefixes are compared in bytes, tokens taken proportionally."""

    def __init__(self) -> None:
        self.least, self._bytes = 0.0, Minimum()  # tokens so far

    def add(self, prompt: bytes, usage: Usage) -> None:
        """Count a prompt."""
        shared = self._bytes.add(prompt)
        self.least += usage.prompt_tokens * (1 - shared / len(prompt)) if prompt else usage.prompt_tokens


async def counted(engine: Engine, calls: Iterable[Call]) -> int | None:
    """The exact minimum in tokens; None if the engine cannot tokenize a prompt."""
    total = Minimum()
    try:
        for call in calls:
            sent = tool_calls.adapt(call.request(), engine.capabilities).request
            total.add(await engine.tokenize(sent.prompt))
    except (RequestRefused, EngineError):
        return None
    return total.least
