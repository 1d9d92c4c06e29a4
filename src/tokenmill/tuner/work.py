"""Requests for measuring an engine: generated jobs with a shared prefix, or the user's own.

Generated prompts are tokens of the model's vocabulary and differ between trials, so nothing comes from a cache and
many experts are activated. The vocabulary is collected by tokenising words, so it has no control tokens.
"""

import hashlib
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from tokenmill.engine.engine import Engine, Request, Sampling
from tokenmill.errors import EngineError
from tokenmill.tuner.point import Aim

SAMPLING = Sampling(temperature=1.0, top_k=40, seed=1)  # greedy decoding would soon repeat itself
STEPS = 32  # minimum steps in which all slots decode together in one wave
_MORE_STEPS = 8  # extra steps of the first slot compared with the last, in addition to the prefill
_WORDS = 3000
_LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
_LEAST_VOCABULARY = 16
_COUNTED = 32  # jobs of which tokens are counted


class TuneRequests(Protocol):
    """Requests to measure with; deterministic in their arguments."""

    @property
    def output_tokens(self) -> int:
        """Output tokens per job."""

    @property
    def depth(self) -> int:
        """Mean tokens per prompt."""

    def head(self, trial: int) -> Request | None:
        """The request for the prefix that a trial's jobs share; None: no known prefix."""

    def job(self, trial: int, number: int) -> Request:
        """A job of a trial."""

    def most_tokens(self, lanes: int, ubatch: int) -> int:
        """Output tokens per slot in a wave, enough for all slots to decode together."""


WorkFor = Callable[[Engine], Awaitable[TuneRequests]]
"""Creates the requests for an engine, which may depend on its vocabulary."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Generated jobs with the lengths of an aim."""

    aim: Aim
    vocabulary: tuple[int, ...]
    seed: int = 0

    @property
    def output_tokens(self) -> int:
        """Output tokens per job."""
        return self.aim.output_tokens

    @property
    def depth(self) -> int:
        """Tokens per prompt."""
        return self.aim.prompt_tokens + max(1, self.aim.tail_tokens)

    def head(self, trial: int) -> Request | None:
        """The shared prefix, with the aim's length."""
        return _request(self._tokens(trial, "head", self.aim.prompt_tokens)) if self.aim.prompt_tokens else None

    def job(self, trial: int, number: int) -> Request:
        """The shared prefix and the job's own tail."""
        tail = self._tokens(trial, f"tail {number}", max(1, self.aim.tail_tokens))
        return _request(self._tokens(trial, "head", self.aim.prompt_tokens) + tail)

    def most_tokens(self, lanes: int, ubatch: int) -> int:
        """Covers the prefill of the last slot, during which the first one generates a token per micro-batch."""
        ahead = -(-lanes * max(1, self.aim.tail_tokens) // ubatch) + _MORE_STEPS
        return ahead + max(STEPS, self.aim.output_tokens)

    def _tokens(self, trial: int, what: str, count: int) -> tuple[int, ...]:
        drawn = random.Random(f"{self.seed} {trial} {what}")  # noqa: S311  nothing secret
        return tuple(drawn.choices(self.vocabulary, k=count))


@dataclass(frozen=True, slots=True)
class Given:
    """The user's jobs, repeated if there are few."""

    jobs: tuple[Request, ...]
    output_tokens: int
    depth: int

    def head(self, trial: int) -> Request | None:
        """None: their shared prefixes are unknown."""
        return None

    def job(self, trial: int, number: int) -> Request:
        """The next job, which ignores the end of text."""
        job = self.jobs[number % len(self.jobs)]
        plain = replace(job.sampling, grammar=None, json_schema=None, top_logprobs=None)
        return replace(job, sampling=plain, stop=(), ignore_eos=True, priority="batch", lane=None, timeout_s=None)

    def most_tokens(self, lanes: int, ubatch: int) -> int:
        """Covers the prefill of the last slot, during which the first one generates."""
        return -(-lanes * self.depth // ubatch) + _MORE_STEPS + max(STEPS, self.output_tokens)


def drawn_name(aim: Aim) -> str:
    """Name of the generated work for an aim, which identifies comparable trials."""
    return f"drawn {aim.prompt_tokens}+{aim.tail_tokens}+{aim.output_tokens}"


def drawing(aim: Aim) -> WorkFor:
    """Generated work; the vocabulary is requested from the first engine only."""
    words: list[tuple[int, ...]] = []

    async def work(engine: Engine) -> TuneRequests:
        if not words:
            words.append(await vocabulary(engine))
        return Drawn(aim, words[0])

    return work


def jobs_name(jobs: Sequence[Request]) -> str:
    """Name of the user's jobs, derived from their content."""
    text = json.dumps([asdict(job) for job in jobs], sort_keys=True, default=str)
    return f"jobs {hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:16]}"


def handing(jobs: Sequence[Request], aim: Aim) -> WorkFor:
    """The user's jobs; those without an output limit get the aim's."""
    ceilings = [aim.output_tokens if job.max_tokens is None else job.max_tokens for job in jobs]
    output = max(1, round(sum(ceilings) / len(ceilings)))
    lengths: list[int] = []

    async def work(engine: Engine) -> TuneRequests:
        if not lengths:
            lengths.extend([len(await engine.tokenize(job.prompt)) for job in jobs[:_COUNTED]])
        return Given(tuple(jobs), output, round(sum(lengths) / len(lengths)))

    return work


async def vocabulary(engine: Engine) -> tuple[int, ...]:
    """Sorted tokens that ordinary words produce in a model."""
    drawn = random.Random("words")  # noqa: S311  nothing secret
    words = ("".join(drawn.choices(_LETTERS, range(26, 0, -1), k=drawn.randint(2, 9))) for _ in range(_WORDS))
    tokens = await engine.tokenize(" ".join(words))
    found = tuple(sorted(set(tokens[1:-1])))  # the first and last may be added by the tokeniser
    if len(found) < _LEAST_VOCABULARY:
        raise EngineError(
            f"the model's vocabulary makes only {len(found)} different tokens of {_WORDS} words",
            hint="measure with jobs of your own: --jobs FILE",
        )
    return found


def _request(tokens: tuple[int, ...]) -> Request:
    return Request(tokens, SAMPLING, ignore_eos=True)
