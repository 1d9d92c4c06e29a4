"""Which tokens may come next in an answer that must follow a grammar or a JSON schema.

llguidance does the work: a matcher follows one answer and computes the mask of allowed tokens, one bit each. `Masks`
computes those of all constrained sequences of a step in one call. Compiling is slow and can take any amount of memory;
the worker does it through compiler.py. Cloning a compiled constraint takes microseconds.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from tokenmill.errors import RequestRefused
from tokenmill.native.constraints.grammar import GrammarText

Logits = NDArray[np.float32]
Mask = NDArray[np.int32]
_MOST_THREADS = 8
_LIMITS = LLParserLimits(verbose_errors=False)
# In a recursive GBNF grammar every character is a terminal of its own.
_GBNF_LIMITS = LLParserLimits(step_max_items=2_000_000, max_items_in_row=20_000, verbose_errors=False)


@dataclass(frozen=True, slots=True)
class TokenTable:
    """What llguidance must know of a vocabulary.

    `pieces` are the bytes of each token, those of control tokens after 0xFF. `ends` are the tokens that end an answer,
    the preferred one first.
    """

    pieces: tuple[bytes, ...]
    ends: tuple[int, ...]


class ConstraintTokenizer:
    """A vocabulary in llguidance's form; creating it takes some 0.2 s for 50,000 tokens.

    `tokenize` is called for text that the grammar leaves no choice about, so that the answer has the tokens that the
    model knows it by. Without it, or where it adds a space before the text, the longest matching tokens are taken.
    """

    def __init__(self, table: TokenTable, tokenize: Callable[[bytes], Sequence[int]] | None = None) -> None:
        self.n_tokens = len(table.pieces)
        adapter = _Adapter(table, tokenize)
        self._tokenizer = LLTokenizer(TokenizerWrapper(adapter), eos_token=list(table.ends))
        adapter.longest = self._tokenizer.greedy_tokenize

    def compile(self, grammar: GrammarText) -> "Constraint":
        """Compile a grammar; RequestRefused where llguidance cannot, or where no token may come first."""
        matcher = LLMatcher(
            self._tokenizer, grammar.text, log_level=0, limits=_GBNF_LIMITS if grammar.is_gbnf else _LIMITS
        )
        constraint = Constraint(matcher, self.n_tokens)
        constraint.mask()
        return constraint


class _Adapter:
    """What `TokenizerWrapper` wraps."""

    bos_token_id = None
    longest: Callable[[str], list[int]] | None = None

    def __init__(self, table: TokenTable, tokenize: Callable[[bytes], Sequence[int]] | None) -> None:
        self.tokens = table.pieces
        self.eos_token_id = table.ends[0]
        self._tokenize = tokenize

    def __call__(self, text: bytes) -> list[int]:
        if self._tokenize is not None:
            tokens = list(self._tokenize(text))
            if b"".join(self.tokens[token] for token in tokens) == text:
                return tokens
        return [] if self.longest is None else self.longest(text.decode())


class Constraint:
    """Follows one answer and decides which tokens may come next."""

    def __init__(self, matcher: LLMatcher, n_tokens: int) -> None:
        self.matcher = matcher
        self._n_tokens = n_tokens
        self._mask: Mask | None = None

    def clone(self) -> "Constraint":
        """An independent copy in the same state."""
        return Constraint(self.matcher.deep_copy(), self._n_tokens)

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""
        return bool(int(self.mask()[token >> 5]) >> (token & 31) & 1)

    def apply(self, logits: Logits) -> Logits:
        """A copy of the logits, -inf for every token that may not come next."""
        bits = np.unpackbits(self.mask().view(np.uint8), count=self._n_tokens, bitorder="little")
        return np.where(bits.view(np.bool_), logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        """Advance by an allowed token."""
        self._mask = None
        if not self.matcher.consume_token(token):
            self.check()

    def mask(self) -> Mask:
        """One bit per token that may come next; RequestRefused where llguidance reached a limit or a dead end."""
        if self._mask is None:
            rows = allocate_token_bitmask(1, self._n_tokens)
            fill_next_token_bitmask(self.matcher, rows)
            self._mask = rows[0]
        self.check()
        return self._mask

    def set_mask(self, mask: Mask) -> None:
        """Use a mask that `Masks` computed, until the next token is accepted."""
        self._mask = mask

    def check(self) -> None:
        """RequestRefused where the matcher has failed: its mask then allows nothing but the end."""
        if self.matcher.is_error():
            raise _refused(self.matcher.get_error())


class Masks:
    """Computes the masks of all constrained sequences of a step in one call, on several threads."""

    def __init__(self, n_tokens: int) -> None:
        self._n_tokens = n_tokens
        self._rows = allocate_token_bitmask(0, n_tokens)
        self._executor: LLExecutor | None = None

    def fill(self, constraints: Sequence[Constraint]) -> None:
        """Compute the next mask of every constraint. The masks are overwritten by the next call."""
        if not constraints:
            return
        if self._executor is None:
            self._executor = LLExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))))
        if len(self._rows) < len(constraints):
            self._rows = allocate_token_bitmask(2 * len(constraints), self._n_tokens)
        fill_next_token_bitmask_par(
            self._executor, [(each.matcher, row) for row, each in enumerate(constraints)], self._rows
        )
        for row, each in enumerate(constraints):
            each.set_mask(self._rows[row])


def _refused(error: str) -> RequestRefused:
    """The error for a grammar that llguidance cannot compile or that no answer can follow from here on."""
    why = error.partition("\n")[0].strip() or "llguidance gives no reason"
    if why == "NoExtensionBias":  # llguidance's name of a state in which no token is allowed
        why = "no answer can satisfy it"
    return RequestRefused(
        f"the grammar or JSON schema cannot be followed: {why[:300]}",
        hint="check it for parts that contradict each other, or simplify it",
    )
