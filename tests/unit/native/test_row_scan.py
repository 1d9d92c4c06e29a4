"""The threaded scan finds the same logits as the search in a single row."""

import math

import numpy as np
import pytest

from tokenmill.native.sampling.logprobs import largest
from tokenmill.native.sampling.row_scan import RowScan

VOCAB = 40_003  # not a multiple of the block size


def rows(count: int, seed: int = 1) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    # Few distinct values, so that most of the largest logits are tied.
    values = np.random.default_rng(seed).integers(-60, 60, (count, VOCAB))
    return values.astype(np.float32)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 40, 100])
def test_every_row_gets_its_largest_logits_and_ties_go_to_the_first_token(threads: int, count: int) -> None:
    matrix = rows(70)
    scan = RowScan(threads)
    for row, found in zip(matrix, scan.scan(matrix, [count] * 70), strict=True):
        assert found is not None
        assert found.tokens.tolist() == largest(row, count).tolist()
        assert found.logits.tolist() == row[found.tokens].tolist()
        assert found.top == row.max()
    scan.close()


def test_rows_with_different_counts_are_scanned_each_with_its_own() -> None:
    matrix = rows(9)
    counts = [1, 1, 40, 0, 40, 20_000, 1, 3, 0]
    found = RowScan(2).scan(matrix, counts)
    # 20,000 of 40,003 are not worth a scan: the sampler sorts the whole row
    assert [None if each is None else len(each.tokens) for each in found] == [1, 1, 40, None, 40, None, 1, 3, None]
    assert found[4] is not None
    assert found[4].tokens.tolist() == largest(matrix[4], 40).tolist()


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("at", [0, 5_000, VOCAB - 1])
def test_a_row_with_a_nan_is_reported_and_does_not_disturb_its_neighbours(count: int, at: int) -> None:
    matrix = rows(5)
    matrix[2, at] = np.nan
    found = RowScan(1).scan(matrix, [count] * 5)
    assert [each is not None and math.isnan(each.top) for each in found] == [False, False, True, False, False]
    assert found[3] is not None
    assert found[3].tokens.tolist() == largest(matrix[3], count).tolist()


def test_no_rows_are_no_work() -> None:
    assert RowScan(2).scan(np.empty((0, VOCAB), np.float32), []) == []
