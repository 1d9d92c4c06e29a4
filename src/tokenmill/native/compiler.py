"""Compiles grammars and JSON schemas for the worker, on a thread that neither decodes nor talks to clients.

A constraint that is already compiled is cloned without waiting for this thread (`cached`). A new one is first compiled
in a child process with limits (compile_check.py), then here. Refusals are remembered, so that a refused schema in
every line of a batch costs one check.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from tokenmill.engine.engine import Sampling
from tokenmill.errors import EngineError, RequestRefused, TokenmillError
from tokenmill.native.constraints.compile_check import CompileCheck
from tokenmill.native.constraints.constraints import Constraint
from tokenmill.native.constraints.grammar import grammar_of
from tokenmill.native.llama.vocab import Vocab

_MOST_COMPILED = 32
_MOST_REFUSED = 256
_Key = tuple[str | None, str | None, int]
_T = TypeVar("_T")
Done = Callable[[Constraint | TokenmillError], None]
"""Called on the compile thread with a constraint for this request alone, or with the error."""


class Compiler:
    """Compiles for one vocabulary. No method waits for a compile."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._check = CompileCheck(lambda: vocab.token_table)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[_Key, Constraint] = OrderedDict()  # at their beginning, only to be cloned
        self._refused: OrderedDict[_Key, RequestRefused] = OrderedDict()  # used by the compile thread alone
        self._queue: SimpleQueue[tuple[Sampling, int, Done] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def cached(self, sampling: Sampling, context_tokens: int) -> Constraint | None:
        """A clone of a compiled constraint; None where `compile` is needed."""
        key = _key(sampling, context_tokens)
        with self._lock:
            found = self._compiled.get(key)
            if found is None:
                return None
            self._compiled.move_to_end(key)
            return found.clone()

    def compile(self, sampling: Sampling, context_tokens: int, done: Done) -> None:
        """Compile a request's constraint and call `done`."""
        self._queue.put((sampling, context_tokens, done))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="compile", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop and abandon the current compile."""
        self._queue.put(None)
        self._check.close()

    def _run(self) -> None:
        while (order := self._queue.get()) is not None:
            sampling, context_tokens, done = order
            try:
                done(self._compile(sampling, context_tokens))
            except TokenmillError as error:
                done(error)
            except Exception as error:  # noqa: BLE001  the thread must survive, and the request must get an answer
                done(EngineError(f"the grammar or JSON schema was not compiled: {type(error).__name__}: {error}"))

    def _compile(self, sampling: Sampling, context_tokens: int) -> Constraint:
        found = self.cached(sampling, context_tokens)
        if found is not None:  # compiled for a request before this one in the queue
            return found
        key = _key(sampling, context_tokens)
        if key in self._refused:
            raise self._refused[key].with_traceback(None)
        try:
            grammar = grammar_of(sampling, context_tokens, self._vocab.token_of)
            self._check.check(grammar)
            made = self._vocab.constraints.compile(grammar)
        except RequestRefused as error:
            _keep(self._refused, key, error, _MOST_REFUSED)
            raise
        with self._lock:
            _keep(self._compiled, key, made, _MOST_COMPILED)
        return made.clone()


def _key(sampling: Sampling, context_tokens: int) -> _Key:
    return sampling.json_schema, sampling.grammar, context_tokens


def _keep(kept: OrderedDict[_Key, _T], key: _Key, value: _T, most: int) -> None:
    kept[key] = value
    if len(kept) > most:
        kept.popitem(last=False)
