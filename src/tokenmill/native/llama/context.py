"""A llama.cpp context: the KV cache, unified or with a stream per sequence, and decoding of batches.

Only the compute thread may use a `LlamaContext`; only `abort` may be called from other threads. In models with sliding
or chunked attention every cell has two owners, its sequence and a twin id: llama.cpp reuses cells that have slid out of
the window of their only owner, so a shared prefix would lose them. It does not reuse cells with two owners.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.engine.fit_params import Buffer
from tokenmill.errors import EngineError
from tokenmill.native.llama import breakdown, state_file
from tokenmill.native.llama.batch import BatchRow, DecodeBatch
from tokenmill.native.llama.interface import Abort, interface_of
from tokenmill.native.llama.model import LlamaModel, ModelMetadata
from tokenmill.native.llama.settings import ContextSettings

Logits = NDArray[np.float32]


class Decoded(Enum):
    """Result of decoding a batch."""

    OK = "ok"
    NO_ROOM = "no room"  # nothing was computed: too few free cells
    ABORTED = "aborted"  # its cells were removed; `LlamaContext.lost` lists sequences that were emptied


class LlamaContext:
    """Cells and compute buffers of a loaded model."""

    def __init__(self, model: LlamaModel, settings: ContextSettings) -> None:
        self.model = model
        self.settings = settings
        self._library = model.library
        self._ffi = model.library.ffi
        self._lib = model.library.lib
        self._interface = interface_of(model.library)
        self._twins = model.facts.window is not None
        self._spare = settings.sequences  # an extra id for probing and saving; there is none with streams
        if settings.sequences not in range(1, most_sequences(model) + 1):
            raise EngineError(
                f"a context of {settings.sequences} sequences is not possible here",
                hint=f"use 1 to {most_sequences(model)}",
            )
        ids = settings.sequences + 1
        if model.facts.cuts:  # else each id has a recurrent state, which takes more memory than rounding saves
            ids = _even(ids, settings.ubatch, most_sequences(model) + 1)
        self._ids = ids * (1 + self._twins)
        if settings.streams:
            check_streams(model.facts)
            self._ids = settings.sequences
        self._flag = self._ffi.new("char[2]")  # a C string whose length, 0 or 1, tells llama.cpp whether to abort
        self._context = self._create()
        self._memory = self._lib.llama_get_memory(self._context)
        if self._memory == self._ffi.NULL:
            self.close()
            raise EngineError(f"{model.path.name} keeps no cells: it cannot generate text")
        self.cells = int(self._lib.llama_n_ctx(self._context))
        self.batch = int(self._lib.llama_n_batch(self._context))
        self.ubatch = int(self._lib.llama_n_ubatch(self._context))
        self.lost: tuple[int, ...] = ()  # sequences that the last aborted batch emptied
        twin = self._ids // 2
        named = settings.sequences + (not settings.streams)
        self._owners = [(id_, id_ + twin) if self._twins else (id_,) for id_ in range(named)]
        self._batch = DecodeBatch(self._ffi, self.batch, self._owners, most_rows=self._ids)
        self._logits: list[Logits] = []  # by row, as views of the memory at `_logits_at`
        self._matrix: Logits = np.empty((0, 0), np.float32)
        self._logits_at = self._ffi.NULL
        self._rows = 0  # rows of logits in the last batch

    def _create(self) -> Any:
        wanted = self.settings
        abort = Abort(self._ffi.cast("void *", _strlen_address()), self._flag)
        params = self._interface.context(self._library, wanted, ids=self._ids, abort=abort)
        log = self.model.log
        mark = self.model.log.mark()
        context = self._lib.llama_init_from_model(self.model.pointer, params.struct)
        if context == self._ffi.NULL:
            error = log.error(mark)
            raise EngineError(
                f"llama.cpp refuses a context of {wanted.cells} cells" + (f": {error}" if error else ""),
                hint=log.last(),
            )
        return context

    def decode(self, rows: Sequence[BatchRow]) -> Decoded:
        """Decode a batch: all rows or none. Raises EngineError for failures other than missing room or an abort."""
        self._rows = 0
        self._batch.fill(rows)
        mark = self.model.log.mark()
        code = int(self._lib.llama_decode(self._context, self._batch.struct))
        if code == 0 and not self._interface.reports_aborts and self._flag[0] != b"\0":
            code = 2
        if code == 0:
            self._read_logits()
            return Decoded.OK
        if code == 1:
            return Decoded.NO_ROOM
        if code == 2:
            self._flag[0] = b"\0"
            # Cells of micro-batches that were computed before the abort still exist.
            emptied = [row.sequence for row in rows if not self.cut(row.sequence, row.position)]
            for sequence in emptied:
                self.cut(sequence, 0)
            self.lost = tuple(dict.fromkeys(emptied))
            return Decoded.ABORTED
        raise EngineError(
            f"llama.cpp could not compute a batch of {len(self._batch)} tokens ({code}):"
            f" {self.model.log.error(mark) or 'it does not say why'}",
            hint=self.model.log.last(),
        )

    def logits(self, row: int) -> Logits:
        """Return the logits of token `row` of the last batch, as a view that the next batch overwrites."""
        at = self._batch.outputs.get(row, self._rows)
        if at >= self._rows:
            raise EngineError(f"there are no logits of place {row} of the batch")
        return self._logits[at]

    def logits_matrix(self) -> Logits:
        """Return the logits of all rows of the last batch, in the order of its rows, as a view like `logits`."""
        return self._matrix[: self._rows]

    def _read_logits(self) -> None:
        """Locate the logits of the last batch; waits for GPUs, which are still computing after llama_decode."""
        rows = len(self._batch.outputs)
        if not rows:
            self._lib.llama_synchronize(self._context)
            return
        found = self._lib.llama_get_logits(self._context)
        if found == self._ffi.NULL:
            raise EngineError(f"llama.cpp has no logits of {rows} tokens", hint=self.model.log.last())
        if found != self._logits_at or rows > len(self._logits):  # the address rarely changes
            values = np.frombuffer(self._ffi.buffer(found, 4 * rows * self.model.vocab.n_tokens), np.float32)
            self._logits_at = found
            self._matrix = values.reshape(rows, -1)
            self._logits = list(self._matrix)
        self._rows = rows

    def copy(self, source: int, target: int, end: int) -> None:
        """Give sequence `target` the cells of `source` before position `end`.

        A unified cache shares the cells. With streams, the next batch copies the whole stream, which is cut at `end`. A
        recurrent state is shared until one of the sequences continues; `end` must then be the end of `source`.
        """
        if self.settings.streams:
            self._lib.llama_memory_seq_cp(self._memory, source, target, -1, -1)
            self.cut(target, end)
            return
        for owner in self._owners[target]:
            self._lib.llama_memory_seq_cp(self._memory, source, owner, 0, end)

    def cut(self, sequence: int, start: int) -> bool:
        """Release a sequence's cells from position `start` on; False, without effect, if the model cannot do that."""
        done = True
        for owner in self._owners[sequence]:
            done = bool(self._lib.llama_memory_seq_rm(self._memory, owner, start, -1)) and done
        return done

    def clear(self) -> None:
        """Empty every sequence."""
        self._lib.llama_memory_clear(self._memory, False)

    def length(self, sequence: int) -> int:
        """Return how many tokens a sequence has."""
        return int(self._lib.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def set_threads(self, decode: int, prefill: int) -> None:
        """Set the threads for decode and prefill from the next batch on."""
        self._lib.llama_set_n_threads(self._context, decode, prefill)

    def abort(self) -> None:
        """Abort the current batch, or the next one, from another thread.

        CPUs check for it before every operation; GPUs complete their part.
        """
        self._flag[0] = b"\1"

    def buffers(self) -> tuple[Buffer, ...]:
        """Return the bytes of model, context and compute by buffer type; empty if llama.cpp does not report them."""
        return breakdown.read(self._library, self._context) or ()

    def can_share(self) -> tuple[bool, str | None]:
        """Test whether prefixes can be shared, and return the reason if not. The context must be empty."""
        facts = self.model.facts
        if self.settings.streams:
            return False, "every slot has cells of its own"
        if not facts.shares:
            return False, facts.why_not
        *first, last = (min(token, self.model.vocab.n_tokens - 1) for token in (1, 2, 3))
        self._probe(_Probe(self._spare, first, 0))
        if not facts.cuts:
            self.copy(self._spare, 0, 2)
        own = self._probe(_Probe(self._spare, [last], 2))
        if facts.cuts:
            self.cut(self._spare, 2)
            self.copy(self._spare, 0, 2)
        shared = self._probe(_Probe(0, [last], 2))
        self.clear()
        # Both times the token is decoded alone after the same two: batch sizes round differently, and a mixture of
        # experts may then choose other experts. A missing prefix changes the logits far more.
        off = float(np.abs(own - shared).max())
        largest = float(np.abs(own).max())
        if off <= 0.05 * largest + 1e-6:
            return True, None
        return False, f"a shared prefix gave other logits than a computed one: off by {off:.3g}, at most {largest:.3g}"

    def _probe(self, row: "_Probe") -> Logits:
        if self.decode([row]) is not Decoded.OK:
            raise EngineError("llama.cpp could not compute three tokens", hint=self.model.log.last())
        return self.logits(len(row.tokens) - 1).copy()

    def save_sequence(self, sequence: int, path: Path, tokens: Sequence[int], identity: Mapping[str, str]) -> int:
        """Write the cells of a sequence's first tokens to a file, and return its size."""
        window = self.model.facts.window
        if window is not None and len(tokens) > window:
            # llama.cpp omits cells outside the window of the last token, so a part of the prefix could not be shared.
            raise EngineError(
                f"a prefix of {len(tokens)} tokens cannot be saved: layers of this model see {window} tokens",
                hint="it stays in memory while the engine runs",
            )
        if not 0 < len(tokens) <= self.length(sequence):
            raise EngineError(f"sequence {sequence} does not have {len(tokens)} tokens to save")
        if not self.model.facts.cuts and self.length(sequence) != len(tokens):
            raise EngineError(f"sequence {sequence} has no state after {len(tokens)} tokens")
        self._lib.llama_memory_seq_cp(self._memory, sequence, self._spare, 0, len(tokens))
        try:
            size = int(self._lib.llama_state_seq_get_size(self._context, self._spare))
            return state_file.write(path, self._identity(identity), tokens, size, self._write_state)
        finally:
            self._lib.llama_memory_seq_rm(self._memory, self._spare, 0, -1)

    def _write_state(self, mapped: mmap, offset: int) -> None:
        target = self._ffi.from_buffer("uint8_t[]", mapped, require_writable=True)
        try:
            size = int(self._lib.llama_state_seq_get_size(self._context, self._spare))
            if self._lib.llama_state_seq_get_data(self._context, target + offset, size, self._spare) != size:
                raise EngineError("llama.cpp did not return the state of a prefix", hint=self.model.log.last())
        finally:
            self._ffi.release(target)

    def restore_sequence(self, sequence: int, path: Path, identity: Mapping[str, str]) -> tuple[int, ...]:
        """Load a saved prefix into an empty sequence; return its tokens. ForeignState for another model or build."""
        with state_file.opened(path, self._identity(identity)) as prefix:
            source = self._ffi.from_buffer("uint8_t[]", prefix.state)
            try:
                mark = self.model.log.mark()
                read = int(self._lib.llama_state_seq_set_data(self._context, source, len(prefix.state), sequence))
            finally:
                self._ffi.release(source)
            if read != len(prefix.state) or self.length(sequence) != len(prefix.tokens):
                self.cut(sequence, 0)
                why = self.model.log.error(mark) or "it does not say why"
                raise EngineError(f"llama.cpp cannot restore the prefix in {path}: {why}", hint=state_file.DAMAGED_HINT)
            if self._twins:
                self.copy(sequence, sequence, len(prefix.tokens))
            return prefix.tokens

    def _identity(self, given: Mapping[str, str]) -> dict[str, str]:
        """Everything that must match for saved cells to be valid."""
        wanted = self.settings
        return {
            **given,
            "llama.cpp": f"{self._library.version}, {self._library.build}",
            "description": self.model.facts.description,
            "parameters": str(self.model.facts.parameters),
            "cache_type_k": wanted.cache_type_k,
            "cache_type_v": wanted.cache_type_v,
            "flash_attention": str(wanted.flash_attention).lower(),
        }

    def close(self) -> None:
        """Free cells and buffers."""
        if self._context is not None:
            self._lib.llama_free(self._context)
            self._context = None


def most_sequences(model: LlamaModel) -> int:
    """Return the maximum sequences of a context: llama.cpp's limit, halved if cells have twins, minus the spare id."""
    return model.library.max_sequences // (1 if model.facts.window is None else 2) - 1


def _even(ids: int, ubatch: int, most: int) -> int:
    """Round up the number of ids so that it divides the micro-batch better; llama.cpp rounds its buffers up to it."""
    allowed = range(ids, min(ids + ids // 4, most) + 1)
    return min(allowed, key=lambda count: (-(-ubatch // count) * count, count))


@dataclass(frozen=True, slots=True)
class _Probe:
    sequence: int
    tokens: list[int]
    position: int
    logits: bool = True


def _strlen_address() -> int:
    """Return the address of C's strlen: an abort callback that does not need the GIL."""
    from cffi import FFI  # noqa: PLC0415 - an extra

    if not _STRLEN:
        ffi = FFI()
        ffi.cdef("size_t strlen(const char *);")
        libc = ffi.dlopen(None)
        _STRLEN.extend([ffi, libc])
    ffi, libc = _STRLEN
    return int(ffi.cast("uintptr_t", ffi.addressof(libc, "strlen")))


_STRLEN: list[Any] = []


def check_streams(facts: ModelMetadata) -> None:
    """Raise EngineError for a model whose memory is not a single KV cache, and for a library without such caches."""
    why = facts.why_not
    if why is None and not facts.cuts:
        why = "its layers with a recurrent state have one per sequence in any case"
    if why is None and not facts.per_slot_caches:
        why = "ik_llama.cpp has one cache for all slots"
    if why is None and facts.window is not None:
        why = f"some of its layers see {facts.window} tokens only, and their cells are stored differently"
    if why is not None:
        raise EngineError(f"this model cannot have a KV cache per slot: {why}", hint="leave streams off")
