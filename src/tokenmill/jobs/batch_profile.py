"""The lengths of a job file's prompts and answers, for planning its batch before anything is stored or loaded.

`batch_profile` reads the first lines completely and only measures the others. Tokens are estimated from bytes, because
the model's vocabulary is not loaded yet.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenmill.errors import RequestRefused, TokenmillError
from tokenmill.jobs.ingest.identity import place, stored_prefix_key
from tokenmill.jobs.ingest.job_file import job_lines
from tokenmill.jobs.ingest.line import call_of
from tokenmill.jobs.scheduler.prefix_groups import Pending, minimum_bytes
from tokenmill.planner.regimes import BatchProfile
from tokenmill.storage.lines import BadLine

SAMPLE = 4096  # lines that are parsed
TOKENS_PER_BYTE = 0.25  # English text in most vocabularies
MAX_TOKENS_PER_BYTE = 0.5  # for the longest prompt, which must fit: most texts have fewer
TEMPLATE_TOKENS = 16  # of the chat template, per job
ASSUMED_ANSWER_TOKENS = 256  # of a job without max_tokens


def batch_profile(path: Path, defaults: Mapping[str, Any] | None = None) -> BatchProfile | None:
    """The profile of a job file's batch; None if no line of the sample can be read. The run reports errors."""
    sample: list[Pending] = []
    answers: list[int] = []
    jobs = longest_bytes = longest_answer = 0
    try:
        for item in job_lines(path):
            if isinstance(item, BadLine):
                continue
            number, text = item
            jobs += 1
            longest_bytes = max(longest_bytes, len(text.encode()))
            if len(sample) >= SAMPLE:
                continue
            try:
                call = call_of(text, defaults)
                placed = place("", call)
                answer = call.request("batch").max_tokens
            except (RequestRefused, ValueError):
                continue
            sample.append(Pending(number, stored_prefix_key(placed.place), placed.prompt_bytes))
            answers.append(ASSUMED_ANSWER_TOKENS if answer is None else answer)
            longest_answer = max(longest_answer, answers[-1])
    except (TokenmillError, OSError):
        return None
    if not sample:
        return None
    total = sum(each.prompt_bytes for each in sample)
    own = minimum_bytes(sample) / len(sample) if len(sample) > 1 else total
    return BatchProfile(
        jobs,
        prefix_tokens=round(TOKENS_PER_BYTE * max(0.0, total / len(sample) - own)),
        own_tokens=round(TOKENS_PER_BYTE * own) + TEMPLATE_TOKENS,
        answer_tokens=max(1, round(sum(answers) / len(answers))),
        longest_tokens=round(MAX_TOKENS_PER_BYTE * longest_bytes) + TEMPLATE_TOKENS + longest_answer,
    )
