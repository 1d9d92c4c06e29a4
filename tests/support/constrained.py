"""Matches documents with the real matcher, without a model: the vocabulary is single bytes and a few longer tokens."""

import random
from functools import cache

import numpy as np

from tokenmill.engine.engine import Sampling
from tokenmill.native.constraints.constraints import Constraint, ConstraintTokenizer, TokenTable
from tokenmill.native.constraints.grammar import grammar_of

WORDS = (b'{"', b'": ', b'",', b"  ", b"true", b"null", b"\xc3\xa9", b"END", b"ab")
END, OTHER_END = 256 + len(WORDS), 257 + len(WORDS)
TABLE = TokenTable((*(bytes([one]) for one in range(256)), *WORDS, b"\xff<end>", b"\xff<stop>"), (END, OTHER_END))


@cache
def tokenizer() -> ConstraintTokenizer:
    """Takes single bytes where the grammar leaves no choice."""
    return ConstraintTokenizer(TABLE, list)


def token_of(text: str) -> int | None:
    """The token of a text such as `<end>`."""
    return {"<end>": END, "<stop>": OTHER_END}.get(text)


def compiled(*, schema: str | None = None, grammar: str | None = None, context: int | None = None) -> Constraint:
    """A compiled constraint; RequestRefused for a grammar that cannot be compiled."""
    return tokenizer().compile(grammar_of(Sampling(json_schema=schema, grammar=grammar), context, token_of))


def follows(constraint: Constraint, document: str) -> bool:
    """Whether the document, byte by byte, is a complete answer."""
    state = constraint.clone()
    for token in document.encode():
        if token not in allowed(state):
            return False
        state.accept(token)
    return END in allowed(state)


def allowed(constraint: Constraint) -> set[int]:
    """The tokens that may come next."""
    logits = constraint.apply(np.zeros(len(TABLE.pieces), np.float32))
    return set(np.flatnonzero(np.isfinite(logits)).tolist())


def drawn(constraint: Constraint, chance: random.Random, most: int = 400) -> str | None:
    """A random answer; None where it did not end."""
    state, text = constraint.clone(), b""
    for _ in range(most):
        choices = allowed(state)
        if END in choices and (len(choices) == 2 or chance.random() < 0.5):
            return text.decode()
        quick = choices & set(b'"}],:-0123456789')  # what ends strings, and no endless blanks
        token = chance.choice(sorted(quick if quick and chance.random() < 0.8 else choices - {END, OTHER_END}))
        text += TABLE.pieces[token]
        state.accept(token)
    return None
