"""A llama.cpp context: one cache of cells for all sequences, or a stream of cells for each, and batches over them.

Only the thread that decodes may use it; `abort` alone is for others. In models with sliding or chunked attention every
cell belongs to two ids, its sequence's and a twin's: llama.cpp takes cells that have slid out of the window of their
only owner for new tokens, and a head that others are to share would lose them. Cells of two owners it leaves alone.
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
from tokenmill.native.llama.library import INSTALL_HINT
from tokenmill.native.llama.model import LlamaModel, ModelMetadata
from tokenmill.native.llama.settings import MAX_SEQUENCES, ContextSettings, cache_type

Logits = NDArray[np.float32]


class Decoded(Enum):
    """What became of a batch."""

    OK = "ok"
    NO_ROOM = "no room"  # nothing was computed: too few free cells
    ABORTED = "aborted"  # nothing is left of it, except in `Context.lost`


class LlamaContext:
    """Cells and compute buffers of a loaded model."""

    def __init__(self, model: LlamaModel, settings: ContextSettings) -> None:
        self.model = model
        self.settings = settings
        self._library = model.library
        self._ffi = model.library.ffi
        self._lib = model.library.lib
        self._twins = model.facts.window is not None
        self._spare = settings.sequences  # an id of our own, for probing and saving; streams have none
        if settings.sequences not in range(1, most_sequences(model) + 1):
            raise EngineError(
                f"a context of {settings.sequences} sequences is not possible here",
                hint=f"1 to {most_sequences(model)} are",
            )
        self._ids = _even(settings.sequences + 1, settings.ubatch, most_sequences(model) + 1) * (1 + self._twins)
        if settings.streams:
            check_streams(model.facts)
            self._ids = settings.sequences
        self._flag = self._ffi.new("char[2]")  # read by C as a string: its length, 0 or 1, is whether to abort
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
        self._logits: list[Logits] = []  # row by row, beginning at ...
        self._logits_at = self._ffi.NULL
        self._rows = 0  # that the last batch has of them

    def _create(self) -> Any:
        wanted = self.settings
        params = self._lib.llama_context_default_params()
        params.n_ctx = wanted.cells
        params.n_seq_max = self._ids
        params.n_batch = wanted.batch
        params.n_ubatch = min(wanted.ubatch, wanted.batch)
        params.n_threads = wanted.threads
        params.n_threads_batch = wanted.threads_batch
        params.type_k = cache_type(wanted.cache_type_k)
        params.type_v = cache_type(wanted.cache_type_v)
        params.flash_attn_type = int(wanted.flash_attention)
        params.abort_callback = self._ffi.cast("void *", _strlen_address())
        params.abort_callback_data = self._flag
        known = {name for name, _ in self._ffi.typeof(params).fields}  # a library of one's own may lack some
        needed: dict[str, Any] = {"kv_unified": not wanted.streams, "swa_full": True}
        if wanted.moe_cache_bytes:
            needed["moe_cache_size"] = wanted.moe_cache_bytes
        if needed.keys() - known:
            raise EngineError(
                f"this llama.cpp has no {', '.join(sorted(needed.keys() - known))}",
                hint="plan without --moe-cache" if "kv_unified" in known else INSTALL_HINT,
            )
        # Rows of logits at once: llama.cpp wants one for every id, and by itself takes one for every token.
        wishes = {"n_outputs_max": self._ids, "op_offload": wanted.op_offload, "no_perf": True}
        for name, value in {**needed, **{name: wishes[name] for name in wishes.keys() & known}}.items():
            setattr(params, name, value)
        log = self.model.log
        mark = self.model.log.mark()
        context = self._lib.llama_init_from_model(self.model.pointer, params)
        if context == self._ffi.NULL:
            error = log.error(mark)
            raise EngineError(
                f"llama.cpp refuses a context of {wanted.cells} cells" + (f": {error}" if error else ""),
                hint=log.last(),
            )
        return context

    def decode(self, rows: Sequence[BatchRow]) -> Decoded:
        """Compute a batch: all rows, or none of them. Anything but room or an abort going wrong raises."""
        self._rows = 0
        self._batch.fill(rows)
        mark = self.model.log.mark()
        code = int(self._lib.llama_decode(self._context, self._batch.struct))
        if code == 0:
            self._read_logits()
            return Decoded.OK
        if code == 1:
            return Decoded.NO_ROOM
        if code == 2:
            self._flag[0] = b"\0"
            # Micro-batches computed before the abort are still there.
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
        """Logits of a token of the last batch, by its place in it: a view that the next batch overwrites."""
        at = self._batch.outputs.get(row, self._rows)
        if at >= self._rows:
            raise EngineError(f"there are no logits of place {row} of the batch")
        return self._logits[at]

    def _read_logits(self) -> None:
        """Find those of the batch just computed; waits for devices, which compute on after the call."""
        rows = len(self._batch.outputs)
        if not rows:
            self._lib.llama_synchronize(self._context)
            return
        found = self._lib.llama_get_logits(self._context)
        if found == self._ffi.NULL:
            raise EngineError(f"llama.cpp has no logits of {rows} tokens", hint=self.model.log.last())
        if found != self._logits_at or rows > len(self._logits):  # mostly they are where they were
            values = np.frombuffer(self._ffi.buffer(found, 4 * rows * self.model.vocab.n_tokens), np.float32)
            self._logits_at = found
            self._logits = list(values.reshape(rows, -1))
        self._rows = rows

    def copy(self, source: int, target: int, end: int) -> None:
        """Let a sequence have another's cells before position `end`, without computing them.

        In one cache it shares them. A stream gets a copy of the other's, made with the next batch, and is cut.
        """
        if self.settings.streams:
            self._lib.llama_memory_seq_cp(self._memory, source, target, -1, -1)
            self.cut(target, end)
            return
        for owner in self._owners[target]:
            self._lib.llama_memory_seq_cp(self._memory, source, owner, 0, end)

    def cut(self, sequence: int, start: int) -> bool:
        """Let go of a sequence's cells from a position on; False where the model's memory cannot, and nothing went."""
        done = True
        for owner in self._owners[sequence]:
            done = bool(self._lib.llama_memory_seq_rm(self._memory, owner, start, -1)) and done
        return done

    def clear(self) -> None:
        """Empty every sequence."""
        self._lib.llama_memory_clear(self._memory, False)

    def length(self, sequence: int) -> int:
        """Tokens that a sequence has."""
        return int(self._lib.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def set_threads(self, decode: int, prefill: int) -> None:
        """Threads from the next batch on, for one token and for more."""
        self._lib.llama_set_n_threads(self._context, decode, prefill)

    def abort(self) -> None:
        """Stop the batch that is being computed, from another thread; the next one where none is.

        The processors look for it before every operation; devices do not, and finish theirs.
        """
        self._flag[0] = b"\1"

    def buffers(self) -> tuple[Buffer, ...]:
        """Bytes of model, context and compute by buffer type; empty where llama.cpp does not say."""
        return breakdown.read(self._library, self._context) or ()

    def can_cut_and_share(self) -> tuple[bool, str | None]:
        """Whether heads can be cut and shared, found by doing it; and why not. The context must be empty."""
        facts = self.model.facts
        if self.settings.streams:
            return False, "every slot has cells of its own"
        if not facts.shares:
            return False, facts.why_not
        *head, last = (min(token, self.model.vocab.n_tokens - 1) for token in (1, 2, 3))
        self._probe(_Probe(self._spare, head, 0))
        own = self._probe(_Probe(self._spare, [last], 2))
        if not self.cut(self._spare, 2):
            self.clear()
            return False, "this model's memory cannot be cut"
        self.copy(self._spare, 0, 2)
        shared = self._probe(_Probe(0, [last], 2))
        self.clear()
        # The same token alone, after the same two: batches of another size round differently, and a mixture of experts
        # may then choose others. A head that was not there at all changes everything.
        off = float(np.abs(own - shared).max())
        largest = float(np.abs(own).max())
        if off <= 0.05 * largest + 1e-6:
            return True, None
        return False, f"a shared head gave other logits than a computed one: off by {off:.3g}, at most {largest:.3g}"

    def _probe(self, row: "_Probe") -> Logits:
        if self.decode([row]) is not Decoded.OK:
            raise EngineError("llama.cpp could not compute three tokens", hint=self.model.log.last())
        return self.logits(len(row.tokens) - 1).copy()

    def save_sequence(self, sequence: int, path: Path, tokens: Sequence[int], identity: Mapping[str, str]) -> int:
        """Write the cells of a sequence's first tokens to a file; the bytes it takes."""
        window = self.model.facts.window
        if window is not None and len(tokens) > window:
            # llama.cpp leaves out cells beyond the window of the last token; a shorter head could not be shared.
            raise EngineError(
                f"a head of {len(tokens)} tokens cannot be saved: layers of this model see {window} tokens",
                hint="it stays in memory while the engine runs",
            )
        if not 0 < len(tokens) <= self.length(sequence):
            raise EngineError(f"sequence {sequence} does not have {len(tokens)} tokens to save")
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
                raise EngineError("llama.cpp did not give the state of a head", hint=self.model.log.last())
        finally:
            self._ffi.release(target)

    def restore_sequence(self, sequence: int, path: Path, identity: Mapping[str, str]) -> tuple[int, ...]:
        """Fill an empty sequence with a saved head; its tokens. ForeignState if it is another model's or build's."""
        with state_file.opened(path, self._identity(identity)) as head:
            source = self._ffi.from_buffer("uint8_t[]", head.state)
            try:
                mark = self.model.log.mark()
                read = int(self._lib.llama_state_seq_set_data(self._context, source, len(head.state), sequence))
            finally:
                self._ffi.release(source)
            if read != len(head.state) or self.length(sequence) != len(head.tokens):
                self.cut(sequence, 0)
                why = self.model.log.error(mark) or "it does not say why"
                raise EngineError(f"llama.cpp cannot restore the head in {path}: {why}", hint=state_file.DAMAGED_HINT)
            if self._twins:
                self.copy(sequence, sequence, len(head.tokens))
            return head.tokens

    def _identity(self, given: Mapping[str, str]) -> dict[str, str]:
        """What must be the same for cells to mean the same."""
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
    """Ids that a context of a model can have: llama.cpp's limit, halved where cells have twins, less one of ours."""
    return MAX_SEQUENCES // (1 if model.facts.window is None else 2) - 1


def _even(ids: int, ubatch: int, most: int) -> int:
    """Somewhat more ids, where micro-batches divide by them better: llama.cpp rounds its compute buffers up to that."""
    allowed = range(ids, min(ids + ids // 4, most) + 1)
    return min(allowed, key=lambda count: (-(-ubatch // count) * count, count))


@dataclass(frozen=True, slots=True)
class _Probe:
    sequence: int
    tokens: list[int]
    position: int
    logits: bool = True


def _strlen_address() -> int:
    """C's strlen: a callback that needs no Python, and so no lock, between two operations."""
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
    """EngineError for models whose memory is not one plain cache of cells."""
    why = facts.why_not
    if why is None and facts.window is not None:
        why = f"some of its layers see {facts.window} tokens only, and their cells are stored differently"
    if why is not None:
        raise EngineError(f"this model cannot have a KV cache per slot: {why}", hint="leave streams off")
