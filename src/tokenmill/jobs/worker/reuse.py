"""Detects and explains prefix cache misses, from the reports of the engine and the scheduler.

Misses are determined from the engine's count of cached tokens, never from timing. Differences within
`tolerance_tokens` are ignored: a tokenizer may merge the last characters of a prefix with the next ones, caches hold
whole blocks, and the expected number is estimated from bytes. Does not influence the order of jobs.
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

SLOT_SIMILARITY = 0.1  # llama-server's default for --slot-prompt-similarity
BORDER_TOKENS = 16  # tolerance for tokens lost where a prefix ends
ESTIMATE_SHARE = 0.1  # tolerance as a share of the expected tokens, because they are estimated from bytes
_SHOWN = 30  # characters on each side of a difference
_EXAMPLES = 3  # kept per cause

Cause = Literal[
    "engine restarted", "cannot reuse", "prefix changed", "slot taken", "below similarity", "evicted", "unknown"
]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Observations about one answer; None or empty: unknown."""

    reuse: Reuse
    prompt: bytes | None = None  # canonical prompt of the job
    source_prompt: bytes | None = None  # canonical prompt of the job that computed the expected prefix
    slot: int | None = None  # that served it
    restarted: bool = False  # the engine restarted after it had computed the prefix
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
    message: str
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
    if evidence.prompt is not None and evidence.source_prompt is not None:
        shared = max(shared, common_length(evidence.prompt, evidence.source_prompt))
    share = min(1.0, shared / prompt_bytes) if prompt_bytes else 0.0
    return min(int(share * usage.prompt_tokens), max(0, usage.prompt_tokens - 1))


def tolerance_tokens(expected: int, block_tokens: int = 1) -> int:
    """Maximum shortfall of cached tokens that does not count as a miss."""
    return BORDER_TOKENS + block_tokens - 1 + int(ESTIMATE_SHARE * expected)


def explain(sent: Dispatch, usage: Usage, prompt_bytes: int, evidence: Evidence) -> Miss | None:
    """The miss; None if there was none or the engine does not report cached tokens."""
    cached = usage.cached_tokens
    expected = expected_tokens(sent, usage, prompt_bytes, evidence)
    if cached is None or cached >= expected - tolerance_tokens(expected, evidence.block_tokens):
        return None
    cause, message, at_byte = _cause(sent, usage, evidence, expected)
    return Miss(sent.job, cause, message, expected, cached, at_byte)


def _cause(sent: Dispatch, usage: Usage, evidence: Evidence, expected: int) -> tuple[Cause, str, int | None]:
    """The first cause that applies, in order of certainty."""
    if evidence.restarted:
        return "engine restarted", "the engine restarted after computing the prefix, which emptied its cache", None
    if evidence.reuse == "none":
        return "cannot reuse", _with("the engine cannot reuse this model's prompts", evidence.notes), None
    changed = _changed(sent, evidence)
    if changed is not None:
        return changed
    causes: tuple[tuple[Cause, str | None], ...] = (
        ("slot taken", _slot_taken(sent, evidence)),
        ("below similarity", _below_similarity(sent, usage, evidence, expected)),
        ("evicted", _evicted(evidence)),
        ("unknown", _unknown(usage, evidence)),
    )
    cause, message = next((cause, message) for cause, message in causes if message is not None)
    return cause, message, None


def _changed(sent: Dispatch, evidence: Evidence) -> tuple[Cause, str, int] | None:
    prompt = evidence.prompt
    source = evidence.source_prompt
    if prompt is None or source is None:
        return None
    at = common_length(prompt, source)
    if at >= sent.expected_bytes or at == len(prompt):
        return None
    now, before = difference(prompt, source, at)
    return "prefix changed", f"the prefix changed at byte {at}:\n  was {before}\n  is  {now}", at


def difference(one: bytes, other: bytes, at: int) -> tuple[str, str]:
    """Excerpts of both texts around a byte, 30 characters to each side, with control characters made visible."""
    return _around(one, at), _around(other, at)


def _around(text: bytes, at: int) -> str:
    # Start at a character boundary, so that a difference inside a character shows the whole character.
    while 0 < at < len(text) and text[at] & 0xC0 == 0x80:
        at -= 1
    before = text[max(0, at - 4 * _SHOWN) : at].decode(errors="replace")[-_SHOWN:]
    after = text[at : at + 4 * _SHOWN].decode(errors="replace")[:_SHOWN]
    return f"{''.join(map(visible, before))}▸{''.join(map(visible, after))}"


def _slot_taken(sent: Dispatch, evidence: Evidence) -> str | None:
    if sent.slot is not None and evidence.slot not in (None, sent.slot):
        return f"sent to slot {sent.slot}, but served by slot {evidence.slot}, because the slot was busy"
    return None


def _below_similarity(sent: Dispatch, usage: Usage, evidence: Evidence, expected: int) -> str | None:
    """Without a requested slot, llama-server only considers slots that hold more than a share of the prompt."""
    threshold = evidence.similarity
    if evidence.reuse == "none" or sent.slot is not None or not threshold or not usage.prompt_tokens:
        return None
    similar = expected / usage.prompt_tokens
    if similar > threshold:
        return None
    return (
        f"the shared prefix is {similar:.0%} of the prompt, and the server only reuses slots that hold more than "
        f"{threshold:.0%} of it (--slot-prompt-similarity)"
    )


def _evicted(evidence: Evidence) -> str | None:
    if evidence.evicted_tokens:
        return f"the engine evicted {evidence.evicted_tokens} tokens in between"
    between = evidence.cells_between
    total = evidence.cells_total
    if between is not None and total is not None and between > total:
        return f"other jobs needed {between} KV cells in between, and the engine has {total}"
    return None


def _unknown(usage: Usage, evidence: Evidence) -> str:
    message = "the engine reports no reason"
    if evidence.prompt and usage.prompt_tokens and usage.cached_tokens:
        at = int(len(evidence.prompt) * usage.cached_tokens / usage.prompt_tokens)
        message += f"; it reused the prompt up to about byte {at}: {_around(evidence.prompt, at)}"
    elif usage.cached_tokens == 0:
        message += "; it reused nothing, so the text that the chat template puts first may differ"
    return _with(message, evidence.notes)


def _with(message: str, notes: Sequence[str]) -> str:
    return f"{message} ({'; '.join(notes)})" if notes else message


@dataclass(slots=True)
class CauseTally:
    """All misses of one cause."""

    cause: Cause
    jobs: int = 0
    lost_tokens: int = 0
    examples: list[Miss] = field(default_factory=list)


class Misses:
    """Lost tokens by cause, with the first examples of each."""

    def __init__(self) -> None:
        self._by_cause: dict[Cause, CauseTally] = {}

    def add(self, miss: Miss) -> None:
        """Count a miss."""
        tallied = self._by_cause.setdefault(miss.cause, CauseTally(miss.cause))
        tallied.jobs += 1
        tallied.lost_tokens += miss.lost_tokens
        if len(tallied.examples) < _EXAMPLES:
            tallied.examples.append(miss)

    def include(self, other: "Misses") -> None:
        """Add another tally."""
        for theirs in other.by_cost():
            tallied = self._by_cause.setdefault(theirs.cause, CauseTally(theirs.cause))
            tallied.jobs += theirs.jobs
            tallied.lost_tokens += theirs.lost_tokens
            tallied.examples += theirs.examples[: _EXAMPLES - len(tallied.examples)]

    @property
    def lost_tokens(self) -> int:
        """Prompt tokens that were computed again."""
        return sum(tallied.lost_tokens for tallied in self._by_cause.values())

    def by_cost(self) -> list[CauseTally]:
        """Tallies by cause, the most lost tokens first."""
        return sorted(self._by_cause.values(), key=lambda tallied: -tallied.lost_tokens)

    def lines(self) -> list[str]:
        """One summary line per cause."""
        return [
            f"{tallied.cause}: {number_of(tallied.lost_tokens, 'prompt token')} computed again in "
            f"{number_of(tallied.jobs, 'job')}; {tallied.examples[0].message}"
            for tallied in self.by_cost()
        ]


MAX_COUNTED_JOBS = 1000  # prompts tokenized again at the end of a run to count the minimum
MAX_COUNTED_TOKENS = 500_000


class MinimumEstimate:
    """Estimated minimum prompt tokens: shared prefixes are measured in bytes and converted proportionally."""

    def __init__(self) -> None:
        self.tokens = 0.0
        self._bytes = Minimum()

    def add(self, prompt: bytes, usage: Usage) -> None:
        """Count a prompt."""
        shared = self._bytes.add(prompt)
        self.tokens += usage.prompt_tokens * (1 - shared / len(prompt)) if prompt else usage.prompt_tokens


async def counted(engine: Engine, calls: Iterable[Call]) -> int | None:
    """The exact minimum prompt tokens of some jobs; None if the engine cannot tokenize a prompt."""
    total = Minimum()
    try:
        for call in calls:
            sent = tool_calls.adapt(call.request(), engine.capabilities).request
            total.add(await engine.tokenize(sent.prompt))
    except (RequestRefused, EngineError):
        return None
    return total.computed
