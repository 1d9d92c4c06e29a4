"""The batch that llama.cpp gets for a step, read back from its memory."""

from typing import Any

import pytest
from cffi import FFI

from support.native import Work
from tokenmill.errors import EngineError
from tokenmill.native.llama.batch import DecodeBatch

BATCH = """
typedef struct llama_batch {
    int32_t n_tokens; int32_t * token; float * embd; int32_t * pos; int32_t * n_seq_id; int32_t ** seq_id;
    int8_t * logits;
} llama_batch;
"""


def made(size: int = 8, *, twins: bool = False) -> DecodeBatch:
    ffi = FFI()
    ffi.cdef(BATCH)
    return DecodeBatch(ffi, size, [(one, one + 4) if twins else (one,) for one in range(4)], most_rows=4)


def content(batch: DecodeBatch) -> list[tuple[int, int, list[int], int]]:
    given: Any = batch.struct
    return [
        (given.token[i], given.pos[i], [given.seq_id[i][k] for k in range(given.n_seq_id[i])], given.logits[i])
        for i in range(given.n_tokens)
    ]


def test_decodes_and_a_chunk_of_a_prompt() -> None:
    batch = made()
    batch.fill([Work(0, [11], 812), Work(3, (12,), 90), Work(2, [13, 14, 15], 4, False)])
    assert content(batch) == [
        (11, 812, [0], 1),
        (12, 90, [3], 1),
        (13, 4, [2], 0),
        (14, 5, [2], 0),
        (15, 6, [2], 0),
    ]
    assert batch.outputs == {0: 0, 1: 1}


def test_nothing_is_left_of_the_batch_before() -> None:
    batch = made()
    batch.fill([Work(0, [1, 2, 3], 0), Work(1, [4, 5], 0)])
    batch.fill([Work(2, [6, 7, 8, 9, 10], 3)])
    assert content(batch) == [(6, 3, [2], 0), (7, 4, [2], 0), (8, 5, [2], 0), (9, 6, [2], 0), (10, 7, [2], 1)]


def test_cells_with_twins_belong_to_both() -> None:
    batch = made(twins=True)
    batch.fill([Work(1, [5, 6], 0)])
    assert content(batch) == [(5, 0, [1, 5], 0), (6, 1, [1, 5], 1)]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([Work(0, list(range(9)), 0)], "9 tokens"),
        ([Work(0, [1] * 5, 0), Work(1, [1] * 4, 0)], "9 tokens"),
        ([Work(0, [], 0)], "0 tokens"),
        ([Work(0, [1], 0)] * 5, "5 rows"),
    ],
)
def test_what_would_end_the_process_is_refused(rows: list[Work], told: str) -> None:
    batch = made()
    with pytest.raises(EngineError, match=told):
        batch.fill(rows)
    assert len(batch) == 0
