"""The options of `tokenmill plan` that describe a batch, from a job file or by its lengths."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from tokenmill.api.tokens import token_counter
from tokenmill.cli.options import TokenCount
from tokenmill.config import Config
from tokenmill.errors import UsageError
from tokenmill.jobs.batch_profile import TEMPLATE_TOKENS, batch_profile
from tokenmill.planner.regimes import BatchProfile

_BATCH = Group.create_ordered("Batch to plan for", sort_key=1)
DEFAULT_JOBS = 10_000
DEFAULT_ANSWER = 256


@Parameter(name="*", group=_BATCH)
@dataclass(frozen=True, slots=True)
class BatchOptions:
    """A batch; without any of these options, the plan is for no batch in particular."""

    jobs: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Plan for the jobs of this file: compares resident and streamed experts and chooses slots and KV layout."""

    job_count: Annotated[int | None, Parameter(metavar="N")] = None
    """Number of jobs, instead of a file. [default: 10000]"""

    prefix_tokens: TokenCount | None = None
    """Tokens at the beginning of a prompt that other jobs share. [default: 0]"""

    own_tokens: TokenCount | None = None
    """Tokens of a prompt that no other job shares. [default: 0]"""

    answer_tokens: TokenCount | None = None
    """Tokens per answer. [default: 256]"""

    def profile(self, model: str, config: Config) -> BatchProfile | None:
        """The batch that the options describe, for this model; None without options."""
        counts = (self.job_count, self.prefix_tokens, self.own_tokens, self.answer_tokens)
        if self.jobs is not None:
            if any(count is not None for count in counts):
                raise UsageError("--jobs cannot be combined with the lengths of a batch", hint="give one or the other")
            with token_counter(model, config) as tokens:
                found = batch_profile(self.jobs, count=tokens.count) if self.jobs.is_file() else None
            if found is None:
                raise UsageError(
                    f"{self.jobs} has no jobs that can be read", hint="run tokenmill lint on it, or check the path"
                )
            return found
        if all(count is None for count in counts):
            return None
        jobs, prefix, own, answer = counts
        if any(count is not None and count < least for count, least in zip(counts, (1, 0, 0, 1), strict=True)):
            raise UsageError("the lengths of a batch must be positive", hint="for example --own-tokens 250")
        prompt = (prefix or 0) + (own or 0)
        answer = DEFAULT_ANSWER if answer is None else answer
        longest = prompt + answer + TEMPLATE_TOKENS
        return BatchProfile(jobs or DEFAULT_JOBS, prefix or 0, (own or 0) + TEMPLATE_TOKENS, answer, longest)
