"""Compiles grammars and JSON schemas in a child process with limits of memory and processor time.

llguidance cannot be interrupted, and some inputs of a few hundred bytes take gigabytes or overflow the stack (`allOf`
over patterns, deeply nested parentheses). The worker therefore compiles only what this child, which has the same
vocabulary, compiled within the limits. If the child dies, the request is refused and the next check starts another.

    python -m tokenmill.native.constraints.compile_check    the child: first the vocabulary, then one grammar per line
"""

import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tokenmill.errors import EngineError, RequestRefused, TokenmillError, from_wire, to_wire
from tokenmill.native.constraints.constraints import ConstraintTokenizer, TokenTable
from tokenmill.native.constraints.grammar import GrammarText
from tokenmill.native.limited_process import ChildDied, LimitedProcess, ProcessLimits, serve
from tokenmill.units import GIB, MIB

LIMITS = ProcessLimits(memory_bytes=256 * MIB, cpu_s=10, wall_s=120.0)
_VOCABULARY_LIMITS = ProcessLimits(memory_bytes=2 * GIB, cpu_s=60, wall_s=300.0)
_STACK_BYTES = 4 * MIB  # half of the usual stack, so that whatever passes here also fits the worker's threads
_HINT = "simplify it: fewer alternatives and patterns combined with allOf, smaller bounds, less nesting"


class CompileCheck:
    """The parent's side. Used by one thread, except `close`."""

    def __init__(self, table: Callable[[], TokenTable]) -> None:
        self._table = table
        self._process = LimitedProcess(__name__)

    def check(self, grammar: GrammarText) -> None:
        """RequestRefused where the grammar cannot be compiled within the limits or allows no first token.

        EngineError where the child cannot be started or something else killed it.
        """
        if self._process.pid is None:
            self._start()
        try:
            reply = self._process.ask(asdict(grammar), LIMITS)
        except ChildDied as error:
            if error.killed:
                message = f"the process that checks grammars and JSON schemas died: {error}"
                raise EngineError(message, hint="retry the request") from None
            message = f"the grammar or JSON schema cannot be compiled: {error}"
            raise RequestRefused(message, hint=_HINT) from None
        if "error" in reply:
            raise from_wire(reply["error"])

    def close(self) -> None:
        """Kill the child; may be called from another thread during a check, which then fails."""
        self._process.close()

    def _start(self) -> None:
        self._process.start()
        table = self._table()
        pieces = [piece.decode("latin-1") for piece in table.pieces]
        try:
            self._process.ask({"pieces": pieces, "ends": table.ends}, _VOCABULARY_LIMITS)
        except ChildDied as error:
            message = f"the process that checks grammars and JSON schemas did not start: {error}"
            raise EngineError(message) from None


class _Child:
    """The child's state: the vocabulary, once it has arrived."""

    def __init__(self) -> None:
        self._tokenizer: ConstraintTokenizer | None = None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._tokenizer is None:
            pieces = tuple(piece.encode("latin-1") for piece in question["pieces"])
            self._tokenizer = ConstraintTokenizer(TokenTable(pieces, tuple(question["ends"])))
            question = {"text": '%llguidance {}\nstart: "a"'}  # allocates what every compile needs
        try:
            self._tokenizer.compile(GrammarText(**question))
        except TokenmillError as error:
            return {"error": to_wire(error)}
        return {}


def main() -> None:
    """Answer on a thread with a small stack until stdin ends."""
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=serve, args=(_Child().answer,), daemon=True)
    thread.start()
    thread.join()
    os._exit(0)


if __name__ == "__main__":
    main()
