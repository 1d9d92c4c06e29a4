"""The replayed allocator on small graphs with known buffer sizes."""

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.planner.compute_graph.allocator import GraphOp, buffer_bytes


def size(*steps: GraphOp) -> int:
    return buffer_bytes(steps, alignment=1)


def test_a_block_is_freed_after_its_last_read() -> None:
    assert size(GraphOp(100), GraphOp(100, (0,)), GraphOp(100, (1,)), GraphOp(100, (2,))) == 200


def test_an_operation_may_overwrite_an_input_without_other_readers() -> None:
    assert size(GraphOp(100), GraphOp(100, (0,), in_place=True)) == 100
    assert size(GraphOp(100), GraphOp(50, (0,), in_place=True)) == 150  # sizes differ
    assert (
        size(GraphOp(100), GraphOp(100, (0,), in_place=True), GraphOp(100, (0, 1), in_place=True)) == 200
    )  # read again


def test_nothing_is_overwritten_through_a_view() -> None:
    assert size(GraphOp(100), GraphOp(0, (0,), view_of=0), GraphOp(100, (1,), in_place=True)) == 200


def test_an_unread_view_keeps_its_source_allocated() -> None:
    seen = (GraphOp(100), GraphOp(0, (0,), view_of=0), GraphOp(100), GraphOp(100, (2,)))
    read = (GraphOp(100), GraphOp(0, (0,), view_of=0), GraphOp(100, (1,)), GraphOp(100, (2,)))
    assert (size(*seen), size(*read)) == (300, 200)


def test_inputs_come_first_and_unread_ones_stay() -> None:
    late = (GraphOp(10), GraphOp(100, is_input=True), GraphOp(100, (0, 1)), GraphOp(100, (2,)))
    unread = (GraphOp(10), GraphOp(100, is_input=True), GraphOp(100, (0,)), GraphOp(100, (2,)))
    assert (size(*late), size(*unread)) == (210, 310)


def test_the_smallest_hole_that_fits_is_taken() -> None:
    # 0..100 and 110..160 become free; 40 bytes are taken from the second block, so that 100 still fit in the first
    steps = (
        GraphOp(100),
        GraphOp(10),
        GraphOp(50),
        GraphOp(10),
        GraphOp(5, (0, 2)),
        GraphOp(40),
        GraphOp(100),
        GraphOp(1, (1, 3, 4, 5, 6)),
    )
    assert size(*steps) == 175


def test_results_are_kept_and_the_cache_is_outside_the_buffer() -> None:
    assert size(GraphOp(100, keep=True), GraphOp(0, (0,), external=True), GraphOp(100)) == 200


def test_sizes_are_padded() -> None:
    assert buffer_bytes([GraphOp(1), GraphOp(1, (0,))], alignment=128) == 256


@given(st.lists(st.tuples(st.integers(1, 50), st.lists(st.integers(0, 30), max_size=3), st.booleans()), max_size=30))
def test_the_buffer_is_between_the_live_tensors_and_all_tensors(drawn: list[tuple[int, list[int], bool]]) -> None:
    steps = [
        GraphOp(count, tuple(read % index for read in reads) if index else (), in_place=in_place)
        for index, (count, reads, in_place) in enumerate(drawn)
    ]
    largest = max((step.bytes for step in steps), default=0)
    assert largest <= size(*steps) <= sum(step.bytes for step in steps)
