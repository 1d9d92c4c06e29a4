"""Division of layers over GPUs: comparison with brute force, and invariants."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.planner.split import FINEST_BYTES, CardSplit, Layer, Overhead, split
from tokenmill.units import GIB, MIB

layer = st.builds(
    Layer, st.integers(1, 40).map(lambda n: n * 16 * MIB), st.sampled_from([0, 1, 2, 3]).map(lambda n: n * GIB)
)
equal = st.tuples(st.integers(1, 12), st.integers(1, 20), st.integers(0, 20)).map(
    lambda t: [Layer(t[1] * 16 * MIB, t[2] * 200 * MIB)] * t[0]
)
models = st.one_of(st.lists(layer, min_size=1, max_size=7), equal)
cards = st.lists(st.integers(0, 40).map(lambda n: n * 256 * MIB), min_size=1, max_size=4)


def overhead(runtime: int = 100 * MIB, head: int = 300 * MIB, staging: int = 500 * MIB) -> Overhead:
    return lambda _card, has_head, staged: runtime + (head if has_head else 0) + (staging if staged else 0)


def used(found: CardSplit, layers: list[Layer], card: int, cost: Overhead) -> int:
    share = found.shares[card]
    if share.start == share.stop:
        return 0
    staged = any(layers[i].expert_bytes and i not in share.experts for i in range(share.start, share.stop))
    base = sum(layers[i].base_bytes for i in range(share.start, share.stop))
    experts = sum(layers[i].expert_bytes for i in share.experts)
    return base + experts + cost(card, share.stop == len(layers), staged)


def most_experts(layers: list[Layer], capacities: list[int], cost: Overhead, first: int) -> int | None:
    """Try all divisions of layers[first:] into one run per GPU, with all sets of experts in each run."""
    count, best = len(layers), None
    for cuts in combinations(range(count - first + len(capacities) - 1), len(capacities) - 1):
        bounds = [first, *(first + cut - index for index, cut in enumerate(cuts)), count]
        held: int | None = 0
        for card, (start, stop) in enumerate(pairwise(bounds)):
            if start == stop:
                continue
            most = _most_in_run(layers, capacities[card], card, start, stop, cost)
            held = None if held is None or most is None else held + most
        if held is not None and (best is None or held > best):
            best = held
    return best


def _most_in_run(layers: list[Layer], capacity: int, card: int, start: int, stop: int, cost: Overhead) -> int | None:
    having = [i for i in range(start, stop) if layers[i].expert_bytes]
    base = sum(layers[i].base_bytes for i in range(start, stop))
    for size in range(len(having), -1, -1):
        staged = size < len(having)
        room = capacity - base - cost(card, stop == len(layers), staged)
        smallest = min(
            (sum(layers[i].expert_bytes for i in chosen) for chosen in combinations(having, size)), default=0
        )
        if smallest <= room:
            return size
    return None


@settings(max_examples=150, deadline=None)
@given(models, cards)
def test_as_good_as_brute_force(layers: list[Layer], capacities: list[int]) -> None:
    layers = layers[:7]
    cost = overhead()
    found = split(layers, capacities, cost)
    for first in range(found.first):
        assert most_experts(layers, capacities, cost, first) is None  # fewer CPU layers are impossible
    if found.first < len(layers):
        assert found.expert_layers == most_experts(layers, capacities, cost, found.first)


@settings(max_examples=200, deadline=None)
@given(models, cards)
def test_every_layer_is_placed_once_and_within_capacity(layers: list[Layer], capacities: list[int]) -> None:
    cost = overhead()
    found = split(layers, capacities, cost)
    runs = [range(share.start, share.stop) for share in found.shares]
    assert [i for run in runs for i in run] == list(range(found.first, len(layers)))
    for card, share in enumerate(found.shares):
        assert set(share.experts) <= {i for i in runs[card] if layers[i].expert_bytes}
        assert used(found, layers, card, cost) <= capacities[card]
        if runs[card]:
            assert share.used_bytes == used(found, layers, card, cost)


@settings(max_examples=150, deadline=None)
@given(models, cards, st.data())
def test_more_memory_is_never_worse(layers: list[Layer], capacities: list[int], data: st.DataObject) -> None:
    card = data.draw(st.integers(0, len(capacities) - 1))
    more = [
        size + (data.draw(st.integers(0, 8)) * GIB if index == card else 0) for index, size in enumerate(capacities)
    ]
    before, after = split(layers, capacities, overhead()), split(layers, more, overhead())
    assert after.first <= before.first
    if after.first == before.first:
        assert after.expert_layers >= before.expert_layers


def test_eight_equal_cards_are_equally_full() -> None:
    layers = [Layer(250 * MIB)] + [Layer(250 * MIB, 9072 * MIB)] * 60
    found = split(layers, [15 * GIB] * 8, overhead(head=1200 * MIB, staging=3 * GIB))
    assert {len(share.experts) for share in found.shares} == {1}
    sizes = [share.used_bytes for share in found.shares]
    assert max(sizes) - min(sizes) < GIB


def test_the_fullest_gpu_has_the_largest_possible_margin() -> None:
    layers = [Layer(100 * MIB, GIB)] * 10
    found = split(layers, [6 * GIB, 6 * GIB], overhead(staging=0))
    assert found.expert_layers == 10
    free = [6 * GIB - share.used_bytes for share in found.shares]
    assert min(free) >= 6 * GIB - 5 * (GIB + 100 * MIB) - 400 * MIB - FINEST_BYTES


@pytest.mark.parametrize("capacities", [[0], [50 * MIB], [0, 0, 0]])
def test_gpus_without_memory_leave_all_layers_to_the_cpu(capacities: list[int]) -> None:
    found = split([Layer(100 * MIB, GIB)] * 4, capacities, overhead())
    assert found.first == 4
    assert found.expert_layers == 0
