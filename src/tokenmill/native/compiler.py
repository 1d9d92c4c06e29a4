"""Compiles grammars and JSON schemas for the worker, on a thread that neither decodes nor talks to clients.

A constraint that is already compiled is cloned without waiting for this thread (`cached`). A new one is first compiled
in a child process with limits (compile_check.py), then here. Verdicts are remembered, so that a refused schema in
every line of a batch costs one check.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from queue import SimpleQueue

from tokenmill.engine.engine import Sampling
from tokenmill.errors import EngineError, RequestRefused, TokenmillError
from tokenmill.native.compile_check import CompileCheck, VocabSource
from tokenmill.native.constraints import Constraint, cached_constraint, constraint_of
from tokenmill.native.vocab import Vocab

_KEPT_VERDICTS = 256
_Key = tuple[str | None, str | None, int]
Done = Callable[[Constraint | TokenmillError], None]
"""Called on the compile thread with a constraint of the caller's own, or with the reason why there is none."""


class Compiler:
    """Compiles for one vocabulary. All methods return at once."""

    def __init__(self, vocab: Vocab, source: VocabSource) -> None:
        self._vocab = vocab
        self._check = CompileCheck(source)
        self._verdicts: OrderedDict[_Key, RequestRefused | None] = OrderedDict()
        self._queue: SimpleQueue[tuple[Sampling, int, Done] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def cached(self, sampling: Sampling, context_tokens: int) -> Constraint | None:
        """A clone of a compiled constraint; None where `compile` is needed."""
        return cached_constraint(self._vocab, sampling, context_tokens)

    def compile(self, sampling: Sampling, context_tokens: int, done: Done) -> None:
        """Compile a request's constraint and call `done`."""
        self._queue.put((sampling, context_tokens, done))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="compile", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop; what is being compiled is abandoned."""
        self._queue.put(None)
        self._check.close()

    def _run(self) -> None:
        while (order := self._queue.get()) is not None:
            sampling, context_tokens, done = order
            try:
                done(self._compiled(sampling, context_tokens))
            except TokenmillError as error:
                done(error)
            except Exception as error:  # noqa: BLE001  the thread must survive, and the request must get an answer
                done(EngineError(f"the grammar or JSON schema was not compiled: {type(error).__name__}: {error}"))

    def _compiled(self, sampling: Sampling, context_tokens: int) -> Constraint:
        found = self.cached(sampling, context_tokens)
        if found is not None:  # compiled for a request before this one in the queue
            return found
        key = (sampling.json_schema, sampling.grammar, context_tokens)
        if key not in self._verdicts:
            try:
                self._check.check(sampling, context_tokens)
                self._verdicts[key] = None
            except RequestRefused as error:
                self._verdicts[key] = error
            if len(self._verdicts) > _KEPT_VERDICTS:
                self._verdicts.popitem(last=False)
        verdict = self._verdicts[key]
        if verdict is not None:
            raise verdict.with_traceback(None)
        made = constraint_of(self._vocab, sampling, context_tokens)
        if made is None:
            raise EngineError("the request has neither a grammar nor a JSON schema")
        return made
