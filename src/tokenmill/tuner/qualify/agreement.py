"""Compares the next-token predictions of two engines: same most likely token, and Kullback-Leibler divergence.

For each position of a text, the engine gets the preceding tokens and generates one token, biased to the text's own,
with the log-probabilities of the most likely ones. With the prefix cached, a position costs one token. Tokens outside
the top list are treated as one, which slightly underestimates the divergence and keeps it non-negative.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

from tokenmill.engine.engine import MAX_LOGPROBS, Engine, Prompt, Request, Sampling, TokenLogprob, answer
from tokenmill.errors import RequestRefused, UsageError
from tokenmill.tuner.qualify.tasks import Passage

BEFORE = 8  # tokens, or words, before the first position
FORCED = 100.0  # logit bias: larger than any difference, and the maximum that servers accept
_LEAST = 1e-12  # probability that counts as zero


@dataclass(frozen=True, slots=True)
class Place:
    """Predictions at one position of a text."""

    text: str  # name of the passage
    position: int  # number of preceding tokens, or words if the engine reports no tokens
    top: tuple[tuple[bytes, float], ...]  # most likely tokens with log-probabilities, best first
    next: float | None  # log-probability of the text's own token; None: not reported


@dataclass(frozen=True, slots=True)
class TextReading:
    """The predictions of one engine at all positions of all texts."""

    by_token: bool
    tokens: tuple[tuple[int, ...], ...]  # tokens of each text; empty if the engine reports none
    places: tuple[Place, ...]

    @property
    def perplexity(self) -> float | None:
        """Perplexity over the positions whose next token is known."""
        known = [place.next for place in self.places if place.next is not None]
        return math.exp(-fmean(known)) if known else None


@dataclass(frozen=True, slots=True)
class Agreement:
    """Comparison of two readings of the same texts."""

    positions: int
    same_top: float  # share of positions
    kl_mean: float
    kl_p95: float
    kl_max: float
    perplexity: float | None
    perplexity_reference: float | None
    worst: tuple[tuple[Place, Place, float], ...]  # candidate, reference, divergence


async def read_texts(
    engine: Engine,
    texts: Sequence[Passage],
    positions: int,
    *,
    like: TextReading | None = None,
    tell: Callable[[int], None] = lambda done: None,
) -> TextReading:
    """Predict up to `positions` positions of each text, sequentially, because batching changes rounding.

    For an engine that cannot tokenize, the tokens of the reading `like` are used.
    """
    top_tokens = min(MAX_LOGPROBS, engine.capabilities.max_logprobs)
    if top_tokens < 1:
        raise UsageError("agreement cannot be measured: the engine reports no log-probabilities")
    tokens = await _tokens(engine, texts)
    if tokens is None and like is not None and like.by_token:
        tokens = like.tokens
    places: list[Place] = []
    for number, passage in enumerate(texts):
        for prompt, position, following in _steps(passage, tokens[number] if tokens else (), positions):
            places.append(await _place(engine, passage.name, prompt, position, following, top_tokens))
            tell(len(places))
    return TextReading(tokens is not None, tokens or (), tuple(places))


def count(texts: Sequence[Passage], positions: int) -> int:
    """Estimated number of positions of a reading."""
    return sum(min(positions, len(passage.text.split()) - BEFORE) for passage in texts)


def compare(candidate: TextReading, reference: TextReading, *, worst: int = 3) -> Agreement:
    """Compare a model with its reference; raises UsageError if their tokens differ."""
    if candidate.by_token and reference.by_token and candidate.tokens != reference.tokens:
        raise UsageError(
            "the two models have different vocabularies, so their predictions cannot be compared",
            hint="use --against with another quantization of the same model",
            code="vocabulary_mismatch",
        )
    others = {(place.text, place.position): place for place in reference.places}
    pairs = [
        (mine, others[mine.text, mine.position]) for mine in candidate.places if (mine.text, mine.position) in others
    ]
    pairs = [(mine, other) for mine, other in pairs if mine.top and other.top]
    if not pairs or candidate.by_token != reference.by_token:
        raise UsageError(
            "the two models have no common positions",
            hint="use engines that report token IDs",
            code="position_mismatch",
        )
    found = [(mine, other, divergence(other.top, mine.top)) for mine, other in pairs]
    values = sorted(value for _, _, value in found)
    same = sum(mine.top[0][0] == other.top[0][0] for mine, other in pairs)
    return Agreement(
        positions=len(pairs),
        same_top=same / len(pairs),
        kl_mean=fmean(values),
        kl_p95=quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0],
        kl_max=values[-1],
        perplexity=candidate.perplexity,
        perplexity_reference=reference.perplexity,
        worst=tuple(sorted(found, key=lambda one: -one[2])[:worst]),
    )


def divergence(reference: Sequence[tuple[bytes, float]], other: Sequence[tuple[bytes, float]]) -> float:
    """KL divergence of `other` from the reference in nats, over the reference's top list with the rest as one token."""
    known = {token: math.exp(logprob) for token, logprob in other}
    absent = sum(token not in known for token, _ in reference)
    left = max(0.0, 1.0 - sum(known.values()))
    # a missing token is at most as likely as the least likely one in the list
    guess = min(*known.values(), left / (absent + 1))
    total = 0.0
    mass = 0.0
    other_mass = 0.0
    for token, logprob in reference:
        p = math.exp(logprob)
        q = max(_LEAST, known.get(token, guess))
        total += p * (math.log(max(p, _LEAST)) - math.log(q))
        mass = mass + p
        other_mass = other_mass + q
    rest = max(_LEAST, 1.0 - mass)
    other_rest = max(_LEAST, 1.0 - other_mass)
    return max(0.0, total + rest * (math.log(rest) - math.log(other_rest)))


async def _tokens(engine: Engine, texts: Sequence[Passage]) -> tuple[tuple[int, ...], ...] | None:
    try:
        return tuple([await engine.tokenize(passage.text.strip()) for passage in texts])
    except RequestRefused:
        return None


def _steps(passage: Passage, tokens: Sequence[int], positions: int) -> list[tuple[Prompt, int, int | None]]:
    """Prompts of growing length with their position, and the following token if tokens are known."""
    if tokens:
        ends = range(BEFORE, min(len(tokens), BEFORE + positions))
        return [(tuple(tokens[:end]), end, tokens[end]) for end in ends]
    words = passage.text.strip().split(" ")
    return [(" ".join(words[:end]), end, None) for end in range(BEFORE, min(len(words), BEFORE + positions))]


async def _place(
    engine: Engine, name: str, prompt: Prompt, position: int, following: int | None, top_tokens: int
) -> Place:
    bias = ((following, FORCED),) if following is not None and engine.capabilities.logit_bias else ()
    sampling = Sampling(temperature=0.0, top_logprobs=top_tokens, logit_bias=bias)
    found = await answer(engine, Request(prompt, sampling, max_tokens=1, ignore_eos=engine.identity.kind != "url"))
    if not found.logprobs:
        return Place(name, position, (), None)
    first = found.logprobs[0]
    forced = following is not None and first.token == following
    top = tuple((one.raw, one.logprob) for one in (first.top or (_alone(first),)))
    return Place(name, position, top, first.logprob if forced else None)


def _alone(found: TokenLogprob) -> TokenLogprob:
    return TokenLogprob(found.text, found.token, found.logprob, found.raw)
