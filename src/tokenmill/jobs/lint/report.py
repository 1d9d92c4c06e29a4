"""What a look at a job file says: findings with their cost in bytes and tokens, and the words for them."""

from dataclasses import dataclass, field
from typing import Literal

from tokenmill.jobs.lint.differences import Difference

BYTES_PER_TOKEN = 4.0  # of English text in today's vocabularies; where no tokeniser is at hand
WORTH_SAYING = 0.001  # of the prompts' bytes
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
    "timestamp": "a date or time that changes is in the prefix",
    "id": "an id that changes is in the prefix",
    "number": "a number that changes is in the prefix",
    "whitespace": "prefixes differ in blanks, line ends or indentation",
    "key_order": "the same tools have their keys in another order",
    "tool_order": "the same tools are listed in another order",
    "near": "prefixes are nearly the same",
    "order": "prefixes have the same text in another order",
    "changing": "text that changes comes before text that does not",
    "behind": "text that other jobs have too stands behind text that changes",
    "context": "system messages end with text of their own",
    "own_end": "prefixes end with an id or a time of their own",
    "long_digest": "prefixes are longer than 16 K tokens",
    "too_long": "prompts do not fit the context",
    "bad_line": "lines cannot be run",
    "custom_id": "a custom_id is used twice",
    "max_tokens": "lines have no max_tokens",
    "tools_behind": "tools may be computed again for every system message",
    "duplicates": "lines ask what another line asks",
    "file_order": "prefixes alternate in the file",
    "empty": "there are no jobs",
}
_BEHIND = "put it behind all that stays the same, best into the last message"
ADVICE: dict[FindingKind, str] = {
    "timestamp": f"{_BEHIND}, or leave it out",
    "id": f"leave it out: custom_id and metadata are not part of the prompt; or {_BEHIND}",
    "number": _BEHIND,
    "whitespace": "write prefixes from one template; --fix makes line ends and blanks before them alike",
    "key_order": "--fix gives each tool the spelling that most lines have",
    "tool_order": "list them in one order; --fix does not, for a model may prefer the first",
    "near": "make them the same, byte for byte, if they mean the same",
    "order": "keep messages, examples and sections in one order",
    "changing": "retrieved text belongs in the last message, behind all that stays the same",
    "behind": "if it is an instruction, put it first; if it is part of the documents, leave it",
    "context": "retrieved text belongs in the last message: what templates write behind a system message, tools and "
    "further messages, is computed again for each",
    "own_end": "it costs little there, but it and all behind it is computed for every job: leave it out, or put it "
    "into the last message",
    "long_digest": "tokenmill digest --tokens N makes one of a given size",
    "too_long": "they will be refused: shorten them, or plan with a longer context",
    "bad_line": "tokenmill run gives each an error line in the output",
    "custom_id": "tokenmill run refuses the file: give each line one of its own",
    "max_tokens": "such an answer may run to the end of the context: set max_tokens",
    "tools_behind": "many templates write tools behind the system message, and those here change",
    "duplicates": "each is computed once; nothing to do",
    "file_order": "tokenmill run orders them itself; nothing to do",
    "empty": "check the file",
}


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One thing that was found."""

    kind: FindingKind
    jobs: int | None  # None: not known which
    cost_bytes: int | None = None  # of prompts, computed unnecessarily; None: no prompt is affected
    example: Difference | None = None
    detail: str | None = None
    fatal: bool = False  # such lines get no answer

    @property
    def title(self) -> str:
        """What it is, in a few words."""
        return TITLES[self.kind]

    @property
    def advice(self) -> str:
        """What to do about it."""
        return ADVICE[self.kind]


@dataclass(frozen=True, slots=True)
class Report:
    """All of a job file."""

    jobs: int
    prompt_bytes: int
    compute_bytes: int  # when every shared prefix is computed once
    repaired_bytes: int  # the same without what was found
    bytes_per_token: float = BYTES_PER_TOKEN
    counted: bool = False  # with the model's own tokeniser, on a sample; otherwise estimated
    findings: tuple[LintFinding, ...] = ()
    bad: tuple[tuple[int, str], ...] = field(default_factory=tuple)  # the first few: line, reason

    def tokens(self, size: int) -> int:
        """Tokens that so many bytes of these prompts make."""
        return round(size / self.bytes_per_token)

    def share(self, size: int) -> float:
        """Of all prompts' bytes."""
        return size / self.prompt_bytes if self.prompt_bytes else 0.0

    @property
    def clean(self) -> bool:
        """Whether nothing costs more than a hundredth of the prompts, and every line can be run."""
        return not any(
            finding.fatal or (finding.kind in COSTLY and self.share(finding.cost_bytes or 0) > TOO_MUCH)
            for finding in self.findings
        )
