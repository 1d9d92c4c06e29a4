"""The lengths of a job file's prompts and answers, for planning its batch before anything is stored or loaded.

`batch_profile` reads the first lines completely and only measures the others. Tokens are estimated from bytes: with the
rate of a few prompts that are counted with the model's vocabulary, or with a usual rate where it is not known.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.errors import RequestRefused, TokenmillError
from tokenmill.jobs.ingest.identity import place, prompt_text, stored_prefix_key
from tokenmill.jobs.ingest.job_file import job_lines
from tokenmill.jobs.ingest.line import call_of
from tokenmill.jobs.openai.call import Call
from tokenmill.jobs.scheduler.prefix_groups import Pending, minimum_bytes
from tokenmill.planner.regimes import BatchProfile
from tokenmill.storage.lines import BadLine

CountTokens = Callable[[str], int]
SAMPLE = 4096  # lines that are parsed
COUNTED = 64  # of those, prompts whose tokens are counted
TOKENS_PER_BYTE = 0.25  # English text in most vocabularies
MAX_TOKENS_PER_BYTE = 0.5  # for the longest prompt, which must fit: most texts have fewer
LONGEST_MARGIN = 1.05  # of the longest prompt, where tokens are counted: lines that are not parsed may be denser
TEMPLATE_TOKENS = 16  # of the chat template, per job
MAX_TEMPLATE_TOKENS = 64  # for the longest prompt
ASSUMED_ANSWER_TOKENS = 256  # of a job without max_tokens


@dataclass(slots=True)
class _Sample:
    """What was read of a job file."""

    jobs: int = 0
    prompts: list[Pending] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    longest_line: str = ""


def batch_profile(
    path: Path, defaults: Mapping[str, Any] | None = None, *, count: CountTokens | None = None
) -> BatchProfile | None:
    """The profile of a job file's batch; None if no line of the sample can be read. The run reports errors.

    `count` returns the tokens of a text.
    """
    try:
        sample = _read(path, defaults)
    except (TokenmillError, OSError):
        return None
    if not sample.prompts:
        return None
    total = sum(each.prompt_bytes for each in sample.prompts)
    jobs = len(sample.prompts)
    own = minimum_bytes(sample.prompts) / jobs if jobs > 1 else total
    rate = TOKENS_PER_BYTE if count is None else _rate(sample.texts, count)
    return BatchProfile(
        sample.jobs,
        prefix_tokens=round(rate * max(0.0, total / jobs - own)),
        own_tokens=round(rate * own) + TEMPLATE_TOKENS,
        answer_tokens=max(1, round(sum(sample.answers) / jobs)),
        longest_tokens=_longest_prompt(sample, defaults, count) + MAX_TEMPLATE_TOKENS + max(sample.answers),
    )


def _read(path: Path, defaults: Mapping[str, Any] | None) -> _Sample:
    sample = _Sample()
    for item in job_lines(path):
        if isinstance(item, BadLine):
            continue
        number, text = item
        sample.jobs += 1
        if len(text) > len(sample.longest_line):
            sample.longest_line = text
        if len(sample.prompts) >= SAMPLE:
            continue
        try:
            call = call_of(text, defaults)
            placed = place("", call)
            answer = call.request("batch").max_tokens
        except (RequestRefused, ValueError):
            continue
        sample.prompts.append(Pending(number, stored_prefix_key(placed.place), placed.prompt_bytes))
        sample.answers.append(ASSUMED_ANSWER_TOKENS if answer is None else answer)
        if len(sample.texts) < COUNTED:
            sample.texts.append(prompt_text(call))
    return sample


def _longest_prompt(sample: _Sample, defaults: Mapping[str, Any] | None, count: CountTokens | None) -> int:
    """The tokens that the longest prompt has at most."""
    line_bytes = len(sample.longest_line.encode())
    if count is None:
        return round(MAX_TOKENS_PER_BYTE * line_bytes)
    try:
        call: Call | None = call_of(sample.longest_line, defaults)
    except (RequestRefused, ValueError):
        call = None
    texts = sample.texts if call is None else [*sample.texts, prompt_text(call)]
    return round(LONGEST_MARGIN * max(map(count, texts)))


def _rate(texts: list[str], count: CountTokens) -> float:
    """Tokens per byte."""
    return sum(map(count, texts)) / max(1, sum(len(text.encode()) for text in texts))
