"""Times one request, and generates prompts that are not cached.

All engines are measured in the same way, from sending a request to its end. The engine's own timings are preferred,
because tokens arrive late and together while the caller's CPU is busy. Without them, arrival times are used; a piece
may have several tokens, so tokens are counted, not pieces.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.engine.engine import Answer, Engine, Prompt, Request, Sampling
from tokenmill.errors import EngineError, RequestRefused

MIN_COMPUTED = 16  # minimum prompt tokens for a prefill speed
CHUNK_WORDS = 2000
FIRSTS = 48  # recent texts that must begin differently; fewer than there are words
_VOCABULARY = """
    river mill stone wheel grain harbour ledger bridge copper lantern winter signal valley engine garden tower keeper
    morning archive current furnace village compass orchard railway machine number letter window market carries turns
    holds weighs follows measures opens returns gathers divides records crosses answers repeats narrow quiet heavy early
    northern broken steady bright distant second careful hollow common empty wooden under beside before through without
    against between toward because although whenever until while however the a its every another some no this that each
"""
WORDS = tuple(_VOCABULARY.split())

Units = tuple[int, ...] | tuple[str, ...]
"""Tokens, or words if the engine does not return tokens."""
Arrivals = Sequence[tuple[float, int]]
"""Pairs of arrival time and number of tokens."""


@dataclass(frozen=True, slots=True)
class Served:
    """Times and tokens of one request."""

    prompt_tokens: int
    cached_tokens: int | None  # None: the engine does not report it
    written_tokens: int
    first_s: float  # from sending it to its first token
    write_s: float | None  # from the first to the last token; None: only one piece arrived
    total_s: float
    timed_tokens: int = 0  # generated in `write_s`
    engine_prefill_s: float | None = None
    engine_decode_s: float | None = None

    @property
    def computed_tokens(self) -> int:
        """Computed prompt tokens; all of them if the engine does not report cached ones."""
        return self.prompt_tokens - (self.cached_tokens or 0)

    @property
    def prefill_tok_s(self) -> float | None:
        """Prompt tokens per second until the first token; None with too few tokens."""
        return self.computed_tokens / self.first_s if self.computed_tokens >= MIN_COMPUTED and self.first_s else None

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens per second after the first."""
        return self.timed_tokens / self.write_s if self.write_s and self.timed_tokens else None


def timed(sent_s: float, arrivals: Arrivals, answer: Answer, ended_s: float) -> Served:
    """The times of a finished stream: the total by the caller's clock, its parts by the engine's clock or by arrivals.

    If the first piece has several tokens, the first token was generated one step earlier for each further token.
    """
    usage = answer.usage
    timings = answer.timings
    total_s = ended_s - sent_s
    arrivals = [(at, count) for at, count in arrivals if count] or [(ended_s, usage.completion_tokens)]
    (first_at, first_count), last_at = arrivals[0], arrivals[-1][0]
    after = sum(count for _, count in arrivals[1:])
    write_s = last_at - first_at if after and last_at > first_at else None
    first_s = first_at - sent_s - ((first_count - 1) * write_s / after if write_s and after else 0.0)
    if usage.completion_tokens > 1 and timings.decode_s and timings.decode_s < total_s:
        write_s = timings.decode_s
        after = usage.completion_tokens - 1
        first_s = total_s - write_s
    return Served(
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        max(first_s, 1e-9),
        write_s,
        total_s,
        after if write_s else 0,
        timings.prefill_s,
        timings.decode_s,
    )


async def serve(engine: Engine, request: Request) -> tuple[Served, Arrivals]:
    """Send a request and receive its answer; returns its times and the arrivals of tokens."""
    arrivals: list[tuple[float, int]] = []
    sent_s = time.perf_counter()
    stream = engine.stream(request)
    try:
        async for event in stream:
            now_s = time.perf_counter()
            if isinstance(event, Answer):
                return timed(sent_s, arrivals, event, now_s), tuple(arrivals)
            arrivals.append((now_s, event.tokens))
    finally:
        await stream.aclose()
    raise EngineError("the stream ended without an answer")


def words(seed: int, count: int) -> tuple[str, ...]:
    """Words in sentences, the same for the same seed, varied enough to activate different experts."""
    found = []
    for _ in range(count):
        seed = (seed * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        drawn = seed >> 33
        found.append(WORDS[drawn % len(WORDS)] + ("." if drawn % 11 == 0 else ""))
    return tuple(found)


class Prose:
    """Generates text that is new at each call, as tokens if the engine returns them."""

    def __init__(self, engine: Engine, seed: int) -> None:
        """Generate text for one engine; each seed gives another text."""
        self._engine = engine
        self._seed = seed
        self._as_tokens: bool | None = None
        self._prefix: tuple[int, ...] = ()
        self._units: list[int | str] = []
        self._firsts: deque[int | str] = deque(maxlen=FIRSTS)
        self.tokens_per_unit = 1.0

    async def take(self, tokens: int) -> Units:
        """`tokens` new tokens; approximate if only words are known.

        The text begins with another token than recent texts, so that its beginning is not cached.
        """
        await self.learn()
        count = tokens if self._as_tokens else max(1, round(tokens / self.tokens_per_unit))
        while True:
            while len(self._units) <= count:
                self._units += await self._more()
            first = self._units[0]
            if first not in self._firsts:
                break
            del self._units[0]
        self._firsts.append(first)
        taken = tuple(self._units[:count])
        self._units = self._units[count:]
        return taken  # type: ignore[return-value]  # all are tokens, or all are words

    async def _more(self) -> Units:
        self._seed += 1
        text = words(self._seed, CHUNK_WORDS)
        return (await self._engine.tokenize(" " + " ".join(text)))[len(self._prefix) :] if self._as_tokens else text

    def prompt(self, units: Units) -> Prompt:
        """The prompt for units."""
        if self._as_tokens:
            return (*self._prefix, *(unit for unit in units if isinstance(unit, int)))
        return " ".join(map(str, units))

    def calibrate(self, units: Units, tokens: int) -> None:
        """Update the tokens per word from a prompt whose token count is known."""
        if units and not self._as_tokens:
            self.tokens_per_unit = tokens / len(units)

    @property
    def prefix_tokens(self) -> int:
        """Tokens that the engine adds before every text, such as BOS; 0 until `learn` was called."""
        return len(self._prefix)

    async def learn(self) -> None:
        """Find out whether the engine returns tokens, and which it adds before every text; asks it only once."""
        if self._as_tokens is None:
            try:
                self._prefix = await self._engine.tokenize("")
                self._as_tokens = True
            except RequestRefused:
                self._as_tokens = False


def request_for(prompt: Prompt, tokens: int, *, slot: int | None = None, ends: bool = False) -> Request:
    """A request that generates exactly `tokens`; perhaps fewer with `ends`, for servers that cannot ignore the end.

    Tokens are sampled, because greedy decoding repeats itself and activates the same experts.
    """
    return Request(prompt, Sampling(temperature=1.0, seed=1), max_tokens=tokens, ignore_eos=not ends, slot=slot)
