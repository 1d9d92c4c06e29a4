"""What prompts share, and what must be computed at least."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.jobs.ingest.identity import CHUNK_BYTES, ENDS, FINE_BYTES, prefix_key_of
from tokenmill.jobs.scheduler.prefix_groups import (
    Minimum,
    Pending,
    PrefixGroup,
    common_length,
    groups,
    minimum,
    minimum_bytes,
    shared_bytes,
)

CHUNKS = [bytes([65 + number]) * CHUNK_BYTES for number in range(4)]
PIECES = [bytes([65 + number]) * FINE_BYTES for number in range(4)]
TEXTS = st.sampled_from([CHUNKS, PIECES]).flatmap(
    lambda parts: st.lists(st.lists(st.sampled_from(parts), min_size=1, max_size=4).map(b"".join), max_size=12)
)


def record(job: int, text: bytes) -> Pending:
    return Pending(job, prefix_key_of(text), len(text))


def in_head_order(texts: list[bytes]) -> list[Pending]:
    return sorted((record(job, text) for job, text in enumerate(texts)), key=lambda each: (each.prefix_key, each.job))


def trie_size(prompts: list[bytes]) -> int:
    """Edges of the trie, counted one by one; the last one of a prompt that adds none is computed all the same."""
    seen: set[bytes] = set()
    size = 0
    for prompt in prompts:
        new = [prompt[: end + 1] for end in range(len(prompt)) if prompt[: end + 1] not in seen]
        seen.update(new)
        size += max(1, len(new)) if prompt else 0
    return size


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40))
def test_the_common_length_is_where_texts_part(head: bytes, one: bytes, other: bytes) -> None:
    length = common_length(head + one, head + other)
    assert (head + one)[:length] == (head + other)[:length]
    assert (head + one)[length : length + 1] != (head + other)[length : length + 1] or length == len(head + one)


def test_tokens_are_compared_like_bytes() -> None:
    assert common_length((1, 2, 3), (1, 2, 4, 5)) == 2


CASES = [
    # (one, other, shared by head keys)
    (b"", b"", 0),
    (b"alike", b"alike", 5),
    (b"x" * 63 + b"a", b"x" * 63 + b"b", 0),  # less than a chunk is not seen
    (b"x" * 64 + b"a", b"x" * 64 + b"b", 64),
    (b"x" * 511 + b"a", b"x" * 511 + b"b", 384),
    (CHUNKS[0] + b"a", CHUNKS[0] + b"b", 512),
    (CHUNKS[0] + b"x" * 300 + b"a", CHUNKS[0] + b"x" * 300 + b"b", 512),
    (CHUNKS[0], CHUNKS[0] + b"b", 512),
    (CHUNKS[0] + CHUNKS[1], CHUNKS[1] + CHUNKS[0], 0),
    (b"y" * 300_000 + b"a", b"y" * 300_000 + b"b", ENDS[-1]),  # beyond, a key does not tell
]


@pytest.mark.parametrize(("one", "other", "shared"), CASES)
def test_keys_tell_what_is_shared_in_whole_chunks(one: bytes, other: bytes, shared: int) -> None:
    records = record(1, one), record(2, other)
    assert shared_bytes(*records) == shared
    assert shared_bytes(*records, texts=(one, other)) == common_length(one, other) >= shared


@given(TEXTS)
def test_groups_are_all_heads_that_two_or_more_share(texts: list[bytes]) -> None:
    records = in_head_order(texts)
    found = Counter((group.shared_bytes, group.jobs) for group in groups(records))
    heads = {one[: common_length(one, other)] for at, one in enumerate(texts) for other in texts[:at]} - {b""}
    expected = Counter((len(head), sum(text.startswith(head) for text in texts)) for head in heads)
    assert found == expected


def test_inner_groups_come_before_those_around_them() -> None:
    digest, one, other = CHUNKS[0] * 3, CHUNKS[1], CHUNKS[2]
    texts = [digest + one + b"1", digest + one + b"2", digest + other + b"3", digest + other + b"4", CHUNKS[3] + b"5"]
    found = list(groups(in_head_order(texts)))
    assert [(group.shared_bytes, group.jobs) for group in found] == [(2048, 2), (2048, 2), (1536, 4)]
    assert all(isinstance(group, PrefixGroup) and group.first in range(4) for group in found)


@given(st.lists(st.binary(min_size=1, max_size=6).map(lambda text: bytes(byte % 3 for byte in text)), max_size=20))
def test_the_minimum_is_every_edge_of_the_trie_once(prompts: list[bytes]) -> None:
    assert minimum(prompts) == trie_size(prompts)
    assert minimum(tuple(prompt) for prompt in prompts) == trie_size(prompts)


@given(TEXTS)
def test_the_minimum_by_keys_is_exact_where_heads_end_with_chunks(texts: list[bytes]) -> None:
    alike = len(texts) - len(set(texts))  # each costs its last byte in the exact one
    inside = sum(any(other != text and other.startswith(text) for other in texts) for text in set(texts))
    exact = minimum(sorted(texts))
    assert exact - alike - inside <= minimum_bytes(in_head_order(texts)) <= exact


def test_little_is_held_however_many_come() -> None:
    least = Minimum(held=10_000)
    for number in range(300):
        least.add(b"head" * 250 + number.to_bytes(2, "big") * 50)
        assert sum(map(len, least._sorted)) <= 10_000
        assert len(least._sorted) == len(least._arrived)
    assert least.units == 300 * 1100
    assert 1000 + 300 * 98 <= least.computed <= 1000 + 300 * 100


def test_one_prompt_larger_than_what_is_held_is_still_compared() -> None:
    assert minimum([b"a" * 100, b"a" * 99 + b"b"], held=10) == 101
