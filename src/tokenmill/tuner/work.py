"""What an engine is given to do while it is measured: jobs with a shared head, or the user's own.

Drawn prompts are tokens of the model's own vocabulary, no two trials' the same: nothing is found in a cache that a
batch would have to compute, and different tokens wake different experts. The vocabulary is what words become in the
model's tokeniser, so control tokens are not in it.
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

SAMPLING = Sampling(temperature=1.0, top_k=40, seed=1)  # the likeliest alone would soon go round in circles
STEPS = 32  # at least, that all lanes write together in one wave
_MORE_STEPS = 8  # a wave's first lane is this many steps ahead of its last, beside what its prompts take
_WORDS = 3000
_LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
_LEAST_VOCABULARY = 16
_COUNTED = 32  # jobs whose tokens are counted


class TuneRequests(Protocol):
    """Requests to measure with. The same numbers give the same requests."""

    @property
    def output_tokens(self) -> int:
        """What a job writes."""

    @property
    def depth(self) -> int:
        """Tokens of a prompt, on average."""

    def head(self, trial: int) -> Request | None:
        """The head that a trial's jobs share; None: they are taken as they are."""

    def job(self, trial: int, number: int) -> Request:
        """One of a trial's jobs."""

    def most_tokens(self, lanes: int, ubatch: int) -> int:
        """What each lane writes in a wave, so that all of them write together for long enough."""


WorkFor = Callable[[Engine], Awaitable[TuneRequests]]
"""The work for an engine: what it is made of may be the engine's own."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Jobs of the lengths that an aim states."""

    aim: Aim
    vocabulary: tuple[int, ...]
    seed: int = 0

    @property
    def output_tokens(self) -> int:
        """What a job writes."""
        return self.aim.output_tokens

    @property
    def depth(self) -> int:
        """Tokens of a prompt."""
        return self.aim.prompt_tokens + max(1, self.aim.tail_tokens)

    def head(self, trial: int) -> Request | None:
        """As many tokens as the aim's head has."""
        return _request(self._tokens(trial, "head", self.aim.prompt_tokens)) if self.aim.prompt_tokens else None

    def job(self, trial: int, number: int) -> Request:
        """The head and a tail of its own."""
        tail = self._tokens(trial, f"tail {number}", max(1, self.aim.tail_tokens))
        return _request(self._tokens(trial, "head", self.aim.prompt_tokens) + tail)

    def most_tokens(self, lanes: int, ubatch: int) -> int:
        """While the last lane's prompt is computed, the first writes on: a token for each micro-batch."""
        ahead = -(-lanes * max(1, self.aim.tail_tokens) // ubatch) + _MORE_STEPS
        return ahead + max(STEPS, self.aim.output_tokens)

    def _tokens(self, trial: int, what: str, count: int) -> tuple[int, ...]:
        drawn = random.Random(f"{self.seed} {trial} {what}")  # noqa: S311  nothing secret
        return tuple(drawn.choices(self.vocabulary, k=count))


@dataclass(frozen=True, slots=True)
class Given:
    """A user's own jobs, over and over where they are few."""

    jobs: tuple[Request, ...]
    output_tokens: int
    depth: int

    def head(self, trial: int) -> Request | None:
        """Which heads they have is not known here."""
        return None

    def job(self, trial: int, number: int) -> Request:
        """The next one, made to write on."""
        job = self.jobs[number % len(self.jobs)]
        plain = replace(job.sampling, grammar=None, json_schema=None, top_logprobs=None)
        return replace(job, sampling=plain, stop=(), ignore_eos=True, priority="batch", lane=None, timeout_s=None)

    def most_tokens(self, lanes: int, ubatch: int) -> int:
        """While the last lane's prompt is computed, the first writes on."""
        return -(-lanes * self.depth // ubatch) + _MORE_STEPS + max(STEPS, self.output_tokens)


def drawn_name(aim: Aim) -> str:
    """What work that is drawn for an aim is called."""
    return f"drawn {aim.prompt_tokens}+{aim.tail_tokens}+{aim.output_tokens}"


def drawing(aim: Aim) -> WorkFor:
    """Drawn work; every life of an engine has the same vocabulary, so the first is asked for it."""
    words: list[tuple[int, ...]] = []

    async def work(engine: Engine) -> TuneRequests:
        if not words:
            words.append(await vocabulary(engine))
        return Drawn(aim, words[0])

    return work


def jobs_name(jobs: Sequence[Request]) -> str:
    """What a user's jobs are called: by what they are."""
    text = json.dumps([asdict(job) for job in jobs], sort_keys=True, default=str)
    return f"jobs {hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:16]}"


def handing(jobs: Sequence[Request], aim: Aim) -> WorkFor:
    """A user's jobs; those that do not say how much they write, write what the aim does."""
    ceilings = [aim.output_tokens if job.max_tokens is None else job.max_tokens for job in jobs]
    output = max(1, round(sum(ceilings) / len(ceilings)))
    lengths: list[int] = []

    async def work(engine: Engine) -> TuneRequests:
        if not lengths:
            lengths.extend([len(await engine.tokenize(job.prompt)) for job in jobs[:_COUNTED]])
        return Given(tuple(jobs), output, round(sum(lengths) / len(lengths)))

    return work


async def vocabulary(engine: Engine) -> tuple[int, ...]:
    """Tokens that ordinary text becomes in a model, in order."""
    drawn = random.Random("words")  # noqa: S311  nothing secret
    words = ("".join(drawn.choices(_LETTERS, range(26, 0, -1), k=drawn.randint(2, 9))) for _ in range(_WORDS))
    tokens = await engine.tokenize(" ".join(words))
    found = tuple(sorted(set(tokens[1:-1])))  # what stands at the ends may be the tokeniser's own
    if len(found) < _LEAST_VOCABULARY:
        raise EngineError(
            f"the model's vocabulary makes only {len(found)} different tokens of {_WORDS} words",
            hint="measure with jobs of your own: --jobs FILE",
        )
    return found


def _request(tokens: tuple[int, ...]) -> Request:
    return Request(tokens, SAMPLING, ignore_eos=True)
