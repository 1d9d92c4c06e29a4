"""The batch that llama.cpp computes next: arrays made once and filled in place.

rows                            batch
sequence 0 at 812: [tok]   ->   tok         pos 812      {0}   logits
sequence 3 at 90:  [tok]   ->   tok         pos 90       {3}   logits
sequence 5 at 0:   512     ->   512 tokens  pos 0..511   {5}   logits of the last, if asked for
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenmill.errors import EngineError


class BatchRow(Protocol):
    """Tokens of one sequence, to be computed at consecutive positions."""

    @property
    def sequence(self) -> int:
        """Whose cells they take."""

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens; at least one."""

    @property
    def position(self) -> int:
        """Position of the first."""

    @property
    def logits(self) -> bool:
        """Whether the last one's logits are wanted."""


class DecodeBatch:
    """Room for `size` tokens; `owners` are the ids that a sequence's cells get, by sequence."""

    def __init__(self, ffi: Any, size: int, owners: Sequence[tuple[int, ...]], *, most_rows: int) -> None:
        self._size = size
        self._most_rows = most_rows
        self._tokens = np.zeros(size, np.int32)
        self._positions = np.zeros(size, np.int32)
        self._owner_counts = np.full(size, len(owners[0]), np.int32)
        self._owners = np.zeros(size, np.uintp)
        self._wanted = np.zeros(size, np.int8)
        self._steps = np.arange(size, dtype=np.int32)
        self._table = np.array(owners, np.int32)
        self._addresses = [int(row.ctypes.data) for row in self._table]
        self._outputs: dict[int, int] = {}
        self._struct = ffi.new("llama_batch *")
        pointers: dict[str, NDArray[Any]] = {
            "token": self._tokens,
            "pos": self._positions,
            "n_seq_id": self._owner_counts,
            "seq_id": self._owners,
            "logits": self._wanted,
        }
        fields = dict(ffi.typeof("llama_batch").fields)
        for name, array in pointers.items():
            setattr(self._struct, name, ffi.cast(fields[name].type, array.ctypes.data))

    @property
    def struct(self) -> Any:
        """llama.cpp's own view of it."""
        return self._struct[0]

    def __len__(self) -> int:
        return int(self._struct.n_tokens)

    @property
    def outputs(self) -> Mapping[int, int]:
        """The row of logits by position of the token in the batch, for tokens with logits."""
        return self._outputs

    def fill(self, rows: Sequence[BatchRow]) -> None:
        """Replace the contents of the batch."""
        tokens = self._tokens
        positions = self._positions
        owners = self._owners
        wanted = self._wanted
        steps = self._steps
        addresses = self._addresses
        wanted[: len(self)] = 0
        self._outputs.clear()
        self._struct.n_tokens = at = 0
        if len(rows) > self._most_rows:  # llama.cpp ends the process when it has no room for their logits
            raise EngineError(f"a batch of {len(rows)} rows is not possible", hint=f"1 to {self._most_rows} are")
        for row in rows:
            given = row.tokens
            count = len(given)
            end = at + count
            if end > self._size or not count:
                raise EngineError(f"a batch of {end} tokens is not possible", hint=f"1 to {self._size} are")
            if count == 1:
                tokens[at], positions[at], owners[at] = given[0], row.position, addresses[row.sequence]
            else:
                tokens[at:end] = given
                np.add(steps[:count], row.position, out=positions[at:end])
                owners[at:end] = addresses[row.sequence]
            if row.logits:
                wanted[end - 1] = 1
                self._outputs[end - 1] = len(self._outputs)
            at = end
        self._struct.n_tokens = at
