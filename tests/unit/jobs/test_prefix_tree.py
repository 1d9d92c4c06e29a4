"""The order in which jobs are taken from the part of the forest that is at hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.prefix_keys import long_key
from tokenmill.jobs.scheduler.cache_model import PrefixIndex
from tokenmill.jobs.scheduler.prefix_groups import Pending, shared_bytes
from tokenmill.jobs.scheduler.prefix_tree import Order, PrefixNode, PrefixTree, length_of

LETTERS = st.lists(st.sampled_from([b"aaaa", b"bbbb", b"cccc", long_key(b"aaaa")]), max_size=4).map(b"".join)
JOBS = st.lists(st.tuples(LETTERS, st.none() | st.integers(1, 50)), max_size=14)


def pending(job: int, head: bytes, output: float | None = 1.0, deadline_s: float | None = None) -> Pending:
    return Pending(job, head, len(head) * 128 + 10, output, deadline_s=deadline_s)


def tree_of(records: list[Pending], order: Order = "stream") -> PrefixTree:
    tree = PrefixTree(order)
    for record in records:
        tree.add(record)
    return tree


def check(tree: PrefixTree, node: PrefixNode | None = None) -> list[Pending]:
    """Sums are what they say, nodes are where they should be, and none is empty."""
    node = node or tree.root
    records = list(node.jobs)
    for first, child in node.children.items():
        assert child.parent is node
        assert child.path.startswith(node.path + first)
        records += check(tree, child)
    assert node.count == len(records)
    assert node.count or node is tree.root
    assert node.unknown == sum(record.output_tokens is None for record in records)
    assert abs(node.work - sum(record.output_tokens or 0 for record in records)) < 1e-6
    assert node.longest == max(map(length_of, records), default=0.0)
    assert all(record.prefix_key.startswith(node.path) for record in records)
    return records


@given(JOBS, st.sampled_from(["stream", "longest", "work", "due"]), st.data())
@settings(max_examples=150)
def test_a_tree_stays_true_while_jobs_come_and_go(
    jobs: list[tuple[bytes, int | None]], order: Order, data: st.DataObject
) -> None:
    records = [pending(number, head, output) for number, (head, output) in enumerate(jobs)]
    tree = tree_of(records, order)
    here = {record.job: record for record in records}
    while here:
        assert sorted(check(tree)) == sorted(here.values())
        assert sorted(tree.walk(data.draw(LETTERS))) == sorted(here.values()), "a walk has everything, once"
        longest = tree.longest()
        assert longest is not None
        assert length_of(longest) == max(map(length_of, here.values()))
        job = data.draw(st.sampled_from(sorted(here)))
        others = [other for number, other in here.items() if number != job]
        assert tree.wanted_bytes(job) == max((shared_bytes(here[job], other) for other in others), default=0)
        assert tree.remove(job) == here.pop(job)
    assert tree.longest() is None


@given(JOBS, LETTERS, st.sampled_from(["stream", "longest", "work"]))
def test_a_walk_finishes_every_group_before_the_next(
    jobs: list[tuple[bytes, int | None]], head: bytes, order: Order
) -> None:
    records = [pending(number, path, output) for number, (path, output) in enumerate(jobs)]
    walked = list(tree_of(records, order).walk(head))
    shared = [shared_bytes(record, pending(-1, head)._replace(prompt_bytes=1 << 20)) for record in walked]
    assert shared == sorted(shared, reverse=True) or head in {record.prefix_key for record in records}
    for length in (4, 8, 12, 24, 28, 32):
        heads = [record.prefix_key[:length] for record in walked if len(record.prefix_key) >= length]
        runs = [head for number, head in enumerate(heads) if number == 0 or heads[number - 1] != head]
        # The groups that the walk begins in are left and not entered again; all others are one run.
        assert len(runs) == len(set(runs))


@pytest.mark.parametrize("words", [b"", b"same", b"same" * 5])
def test_the_longest_come_first_in_a_group_and_groups_as_asked(words: bytes) -> None:
    """Also where all prompts begin with the same few words."""
    a, b, c = b"aaaa", b"bbbb", b"cccc"
    keys = {1: (a, b"1111"), 2: (a, b"2222"), 3: (b, b"3333")} | {
        number: (c, bytes([number] * 4)) for number in (4, 5, 6)
    }
    outputs = {1: 5, 2: 9, 3: 20}
    records = [
        pending(number, words + long_key(*chunks), outputs.get(number, 7), 100.0 - number if number > 3 else None)
        for number, chunks in keys.items()
    ]
    orders: dict[Order, list[int]] = {
        "stream": [2, 1, 3, 4, 5, 6],
        "longest": [3, 2, 1, 4, 5, 6],
        "work": [4, 5, 6, 3, 2, 1],
        "due": [4, 5, 6, 2, 1, 3],
        "file": [1, 2, 3, 4, 5, 6],
    }
    for order, jobs in orders.items():
        assert [record.job for record in tree_of(records, order).walk(b"")] == jobs, order
    tree = tree_of(records)
    tree.order = "longest"
    assert [record.job for record in tree.walk(b"")] == orders["longest"]


def test_a_job_of_unknown_length_may_be_the_longest() -> None:
    records = [pending(1, long_key(b"aaaa", b"1111"), 500), pending(2, long_key(b"aaaa", b"2222"), None)]
    assert [record.job for record in tree_of(records).walk(b"")] == [2, 1]


def test_what_the_stream_goes_on_with_is_worked_last() -> None:
    paths = {1: b"bbbb1111", 2: b"bbbb2222", 3: b"cccc3333", 4: b"cccc4444"}
    records = [pending(number, long_key(b"aaaa", path), 9 if number > 2 else 1) for number, path in paths.items()]
    tree = tree_of(records)
    assert [record.job for record in tree.walk(b"")] == [3, 4, 1, 2]
    tree.open = records[-1].prefix_key
    assert [record.job for record in tree.walk(b"")] == [1, 2, 3, 4]


def test_a_skipped_group_is_left_out() -> None:
    tree = tree_of([pending(1, b"aaaabbbb1111"), pending(2, b"aaaabbbb2222"), pending(3, b"aaaacccc3333")])
    left = list(tree.below(tree.root, lambda node: node.path == b"aaaabbbb"))
    assert [record.job for record in left] == [3]


def test_the_jobs_that_diverge_are_those_of_every_shared_prefix() -> None:
    heads = [b"aaaabbbb1111", b"aaaabbbb2222", b"aaaabbbb3333", b"aaaacccc4444", b"aaaacccc5555", b"dddd6666"]
    tree = tree_of([pending(number, head) for number, head in enumerate(heads)])
    assert [record.job for record in tree.diverging(0, each=9)] == [1, 2, 3, 4, 5]
    assert [record.job for record in tree.diverging(0, each=1)] == [1, 3, 5]
    assert [record.job for record in tree.diverging(5, each=2)] == [0, 1]


@given(JOBS, LETTERS, st.data())
def test_heads_know_what_they_take_and_what_is_found(
    jobs: list[tuple[bytes, int | None]], head: bytes, data: st.DataObject
) -> None:
    heads, here = PrefixIndex(), list[Pending]()
    for number, (path, _) in enumerate(jobs):
        here.append(pending(number, path))
        heads.add(here[-1])
    while here:
        ordered = sorted(here, key=lambda record: record.prefix_key)
        unshared = sum(record.prompt_bytes for record in ordered)
        assert heads.bytes == unshared - sum(map(shared_bytes, ordered, ordered[1:]))
        new = pending(99, head)
        found, like = heads.best(new)
        assert found == max(shared_bytes(new, record) for record in here)
        assert (like is None) == (found == 0)
        gone = data.draw(st.sampled_from(here))
        others = [record for record in here if record is not gone]
        assert heads.best(gone)[0] == max((shared_bytes(gone, record) for record in others), default=0)
        heads.drop(gone.job)
        here.remove(gone)
    assert heads.bytes == len(heads) == 0


def test_the_head_that_was_used_longest_ago_is_the_oldest() -> None:
    heads, running = PrefixIndex(), PrefixIndex()
    records = [pending(number, bytes([number] * 4)) for number in range(3)]
    for record in records:
        heads.add(record)
    heads.add(records[0])
    assert heads.oldest(excluding=running) == 1
    running.add(records[1])
    assert heads.oldest(excluding=running) == 2
