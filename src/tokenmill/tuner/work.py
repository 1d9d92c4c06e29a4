"""Requests for measuring an engine: generated jobs with a shared prefix, or the user's own jobs.

Generated prompts are random tokens that differ between trials, so that nothing is cached and many experts are
activated. Their vocabulary is collected by tokenizing words, so it has no control tokens.
"""

import hashlib
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from tokenmill.engine.engine import Engine, Request, Sampling
from tokenmill.errors import EngineError
from tokenmill.tuner.point import Aim

SAMPLING = Sampling(temperature=1.0, top_k=40, seed=1)  # greedy decoding repeats itself
STEPS = 32  # minimum steps in which all slots decode together in one wave
_MORE_STEPS = 8  # extra steps of the first slot compared with the last, in addition to the prefill
_WORDS = 3000
_LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
_MIN_VOCABULARY = 16
_COUNTED = 32  # jobs whose tokens are counted


class TuneRequests(Protocol):
    """Requests to measure with; deterministic in their arguments."""

    @property
    def output_tokens(self) -> int:
        """Output tokens per job."""

    @property
    def depth(self) -> int:
        """Mean tokens per prompt."""

    def prefix(self, trial: int) -> Request | None:
        """A request for the shared prefix of a trial's jobs; None if it is unknown."""

    def job(self, trial: int, number: int) -> Request:
        """A job of a trial."""

    def wave_tokens(self, slots: int, ubatch: int) -> int:
        """Output tokens per slot in a wave, enough for all slots to decode concurrently."""


WorkFor = Callable[[Engine], Awaitable[TuneRequests]]
"""Creates the requests for an engine; they may depend on its vocabulary."""


@dataclass(frozen=True, slots=True)
class GeneratedJobs:
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

    def prefix(self, trial: int) -> Request | None:
        """The shared prefix, with the aim's length."""
        return _request(self._tokens(trial, "head", self.aim.prompt_tokens)) if self.aim.prompt_tokens else None

    def job(self, trial: int, number: int) -> Request:
        """The shared prefix and the job's own tail."""
        tail = self._tokens(trial, f"tail {number}", max(1, self.aim.tail_tokens))
        return _request(self._tokens(trial, "head", self.aim.prompt_tokens) + tail)

    def wave_tokens(self, slots: int, ubatch: int) -> int:
        """Includes the tokens that the first slot generates, one per micro-batch, until the last slot has started."""
        ahead = -(-slots * max(1, self.aim.tail_tokens) // ubatch) + _MORE_STEPS
        return ahead + max(STEPS, self.aim.output_tokens)

    def _tokens(self, trial: int, what: str, count: int) -> tuple[int, ...]:
        drawn = random.Random(f"{self.seed} {trial} {what}")  # noqa: S311  nothing secret
        return tuple(drawn.choices(self.vocabulary, k=count))


@dataclass(frozen=True, slots=True)
class UserJobs:
    """The user's jobs, repeated if there are few."""

    jobs: tuple[Request, ...]
    output_tokens: int
    depth: int

    def prefix(self, trial: int) -> Request | None:
        """None: the shared prefixes are unknown."""
        return None

    def job(self, trial: int, number: int) -> Request:
        """One of the jobs, changed to ignore the end of text."""
        job = self.jobs[number % len(self.jobs)]
        plain = replace(job.sampling, grammar=None, json_schema=None, top_logprobs=None)
        return replace(job, sampling=plain, stop=(), ignore_eos=True, priority="batch", slot=None, timeout_s=None)

    def wave_tokens(self, slots: int, ubatch: int) -> int:
        """Includes the tokens that the first slot generates until the last slot has started."""
        return -(-slots * self.depth // ubatch) + _MORE_STEPS + max(STEPS, self.output_tokens)


def generated_jobs_name(aim: Aim) -> str:
    """Name of the generated jobs for an aim; trials with the same name are comparable."""
    return f"drawn {aim.prompt_tokens}+{aim.tail_tokens}+{aim.output_tokens}"


def generated_jobs(aim: Aim) -> WorkFor:
    """Jobs generated for an aim; the vocabulary is read from the first engine."""
    words: list[tuple[int, ...]] = []

    async def work(engine: Engine) -> TuneRequests:
        if not words:
            words.append(await vocabulary(engine))
        return GeneratedJobs(aim, words[0])

    return work


def user_jobs_name(jobs: Sequence[Request]) -> str:
    """Name of the user's jobs, derived from their content."""
    text = json.dumps([_content(job) for job in jobs], sort_keys=True, default=str)
    return f"jobs {hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:16]}"


def _content(job: Request) -> dict[str, Any]:
    """A job as a dict, with the key `lane` for its slot as in stored trials."""
    content = asdict(job)
    content["lane"] = content.pop("slot")
    return content


def user_jobs(jobs: Sequence[Request], aim: Aim) -> WorkFor:
    """The user's jobs; the aim's output length is used for those without a limit."""
    limits = [aim.output_tokens if job.max_tokens is None else job.max_tokens for job in jobs]
    output = max(1, round(sum(limits) / len(limits)))
    lengths: list[int] = []

    async def work(engine: Engine) -> TuneRequests:
        if not lengths:
            lengths.extend([len(await engine.tokenize(job.prompt)) for job in jobs[:_COUNTED]])
        return UserJobs(tuple(jobs), output, round(sum(lengths) / len(lengths)))

    return work


async def vocabulary(engine: Engine) -> tuple[int, ...]:
    """Sorted tokens of random words in the model's vocabulary."""
    drawn = random.Random("words")  # noqa: S311  nothing secret
    words = ("".join(drawn.choices(_LETTERS, range(26, 0, -1), k=drawn.randint(2, 9))) for _ in range(_WORDS))
    tokens = await engine.tokenize(" ".join(words))
    found = tuple(sorted(set(tokens[1:-1])))  # the first and last may be added by the tokenizer
    if len(found) < _MIN_VOCABULARY:
        raise EngineError(
            f"{_WORDS} random words have only {len(found)} different tokens in this model",
            hint="measure with your own jobs: --jobs FILE",
        )
    return found


def _request(tokens: tuple[int, ...]) -> Request:
    return Request(tokens, SAMPLING, ignore_eos=True)
