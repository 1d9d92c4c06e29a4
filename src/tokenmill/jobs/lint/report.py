"""Lint report of a job file: findings with their costs, titles and advice."""

from dataclasses import dataclass, field
from typing import Literal

from tokenmill.jobs.lint.differences import Difference

BYTES_PER_TOKEN = 4.0  # estimate without a tokenizer; typical of English text
MIN_REPORTED_SHARE = 0.001  # of the prompt bytes; smaller costs are not reported
TOO_MUCH = 0.01
LONG_DIGEST_TOKENS = 16 * 1024

FindingKind = Literal[
    "timestamp",
    "id",
    "number",
    "whitespace",
    "key_order",
    "tool_order",
    "near",
    "order",
    "changing",
    "behind",
    "context",
    "own_end",
    "long_digest",
    "too_long",
    "answer_room",
    "bad_line",
    "custom_id",
    "max_tokens",
    "tools_behind",
    "duplicates",
    "file_order",
    "empty",
]
COSTLY: tuple[FindingKind, ...] = (
    "timestamp",
    "id",
    "number",
    "whitespace",
    "key_order",
    "tool_order",
    "near",
    "order",
    "changing",
)
FIXABLE: frozenset[FindingKind] = frozenset(("whitespace", "key_order"))

TITLES: dict[FindingKind, str] = {
    "timestamp": "prefixes contain a changing date or time",
    "id": "prefixes contain a changing id",
    "number": "prefixes contain a changing number",
    "whitespace": "prefixes differ in spaces, line endings or indentation",
    "key_order": "equal tools differ in the order of their keys",
    "tool_order": "equal tools are listed in different orders",
    "near": "prefixes are nearly equal",
    "order": "prefixes have the same text in different orders",
    "changing": "changing text precedes unchanging text",
    "behind": "text that jobs share follows changing text",
    "context": "system messages end with text that no other job has",
    "own_end": "prefixes end with a unique id or time",
    "long_digest": "prefixes are longer than 16 K tokens",
    "too_long": "prompts do not fit the context",
    "answer_room": "max_tokens is too small for the JSON schema",
    "bad_line": "lines cannot be run",
    "custom_id": "a custom_id is used twice",
    "max_tokens": "lines have no max_tokens",
    "tools_behind": "tools may be recomputed for every system message",
    "duplicates": "lines repeat the request of another line",
    "file_order": "prefixes alternate in the file",
    "empty": "the file has no jobs",
}
_BEHIND = "move it after everything that stays the same, preferably into the last message"
ADVICE: dict[FindingKind, str] = {
    "timestamp": f"{_BEHIND}, or remove it",
    "id": f"remove it and use custom_id or metadata, which are not part of the prompt; or {_BEHIND}",
    "number": _BEHIND,
    "whitespace": "write prefixes from one template; --fix unifies line endings and trailing spaces",
    "key_order": "--fix gives each tool the key order that most lines have",
    "tool_order": "list them in one order; --fix leaves them, because models may prefer the first tool",
    "near": "make them identical, byte for byte, if they mean the same",
    "order": "keep messages, examples and sections in the same order",
    "changing": "put retrieved text into the last message, after everything that stays the same",
    "behind": "put it first if it is an instruction; leave it if it is part of a document",
    "context": "put retrieved text into the last message: tools and messages that follow the system message are "
    "recomputed for each job",
    "own_end": "it costs little there, but everything from it on is computed for every job: remove it, or move it "
    "into the last message",
    "long_digest": "shorten it with tokenmill digest --tokens N",
    "too_long": "these jobs will fail: shorten the prompts, or plan with a larger context",
    "answer_room": "every answer would be cut in the middle of the JSON: raise max_tokens",
    "bad_line": "tokenmill run writes an error line for each of them",
    "custom_id": "tokenmill run refuses the file: give each line a unique custom_id",
    "max_tokens": "answers may fill the rest of the context: set max_tokens",
    "tools_behind": "many templates put tools after the system message, which changes in this file",
    "duplicates": "nothing to do: each request is computed once",
    "file_order": "nothing to do: tokenmill run groups jobs by prefix",
    "empty": "check the file",
}


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One finding."""

    kind: FindingKind
    jobs: int | None  # None: unknown
    cost_bytes: int | None = None  # prompt bytes computed unnecessarily; None: no prompt is affected
    example: Difference | None = None
    detail: str | None = None
    fatal: bool = False  # the jobs will fail

    @property
    def title(self) -> str:
        """A short description."""
        return TITLES[self.kind]

    @property
    def advice(self) -> str:
        """How to fix it."""
        return ADVICE[self.kind]


@dataclass(frozen=True, slots=True)
class Report:
    """The lint report of a job file."""

    jobs: int
    prompt_bytes: int
    compute_bytes: int  # to be computed, with every shared prefix computed once
    repaired_bytes: int  # the same after all findings were fixed
    bytes_per_token: float = BYTES_PER_TOKEN
    counted: bool = False  # bytes_per_token was measured with the model's tokenizer; otherwise it is an estimate
    findings: tuple[LintFinding, ...] = ()
    bad: tuple[tuple[int, str], ...] = field(default_factory=tuple)  # the first few: line, reason

    def tokens(self, size: int) -> int:
        """Estimated tokens of a number of prompt bytes."""
        return round(size / self.bytes_per_token)

    def share(self, size: int) -> float:
        """A number of bytes as a share of all prompt bytes."""
        return size / self.prompt_bytes if self.prompt_bytes else 0.0

    @property
    def clean(self) -> bool:
        """Whether every line can be run and no finding costs more than 1 % of the prompt bytes."""
        return not any(
            finding.fatal or (finding.kind in COSTLY and self.share(finding.cost_bytes or 0) > TOO_MUCH)
            for finding in self.findings
        )
