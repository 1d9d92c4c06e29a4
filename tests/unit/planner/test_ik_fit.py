"""ik_llama.cpp's `--fit`: its estimates in the log, and the resulting placement."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.ik import model, settings
from tokenmill.planner.compute_graph.ik_memory import DEFAULT_MARGIN_BYTES, FitSizes, fit_sizes, free_at_start, own_fit
from tokenmill.planner.compute_graph.ik_options import IK_FIRST_FIT, IK_SPRING_2026, IkOptions
from tokenmill.units import GIB, MIB

KIMI = model("kimi-k2.5:Q4_X")
CARDS = [free_at_start(24576 * MIB)] * 8


def test_layer_sizes_of_the_log() -> None:
    """`Layer  1:   9272.15,     23.35,   9295.50     2500.00  MiB` with `-c 40000 -ub 2048 -ctk q8_0` (ik#1916)."""
    sizes = fit_sizes(KIMI, settings(40000, 2048), options=IK_SPRING_2026)
    assert [size / MIB for size in sizes.layers[:2]] == pytest.approx([570.00, 9295.50], abs=0.01)
    assert len(set(sizes.layers[1:])) == 1
    assert sizes.compute / MIB == pytest.approx(2500.00, abs=0.01)
    assert (sizes.head / MIB, sizes.experts[1] / MIB) == pytest.approx((1190, 9072), abs=0.1)


def test_one_margin_leaves_the_last_card_fullest() -> None:
    """The first days of `--fit`, `--fit-margin 3072` at 100 K: a layer's experts on every card."""
    found = own_fit(
        fit_sizes(KIMI, settings(102400, 256, "q6_0"), options=IK_FIRST_FIT), CARDS, [3072 * MIB], options=IK_FIRST_FIT
    )
    assert [found.layers.count(gpu) for gpu in range(8)] == [8, 8, 8, 7, 8, 7, 8, 7]
    assert found.head == 7
    assert found.experts == ((1,), (8,), (16,), (24,), (31,), (39,), (46,), (54,))
    assert not found.too_small


@pytest.mark.parametrize("margins", [[12000], [12000] * 7 + [12550]], ids=["one", "a list, of which one is read"])
def test_a_large_margin_empties_the_last_card(margins: list[int]) -> None:
    """From 28 March 2026 the margin alone counts: 12000 keeps experts off the card that has the output."""
    found = own_fit(
        fit_sizes(KIMI, settings(92160, 256, "q5_0"), options=IK_SPRING_2026),
        CARDS,
        [mib * MIB for mib in margins],
        options=IK_SPRING_2026,
    )
    assert [found.layers.count(gpu) for gpu in range(8)] == [8, 8, 8, 7, 8, 7, 8, 7]
    assert [len(held) for held in found.experts] == [1, 1, 1, 1, 1, 1, 1, 0]


def test_margins_for_each_card_move_layers_too() -> None:
    asked = fit_sizes(KIMI, settings(92160, 256, "q5_0"), options=IkOptions(amb_mib=0))
    found = own_fit(asked, CARDS, [12000 * MIB] * 7 + [16000 * MIB], options=IkOptions(amb_mib=0))
    assert found.layers.count(7) < 7
    assert found.experts[7] == ()


def test_the_same_margin_promises_too_much_since_the_compute_buffer_is_not_counted() -> None:
    asked = fit_sizes(KIMI, settings(102400, 256, "q6_0"), options=IK_SPRING_2026)
    found = own_fit(asked, CARDS, [3072 * MIB], options=IK_SPRING_2026)
    assert [len(held) for held in found.experts[:7]] == [2] * 7  # 18 GiB, plus 9.5 GiB of buffer later


def test_too_little_for_even_the_attention() -> None:
    asked = fit_sizes(KIMI, settings(102400, 256, "q6_0"), options=IK_SPRING_2026)
    found = own_fit(asked, [2 * GIB] * 2, [512 * MIB], options=IK_SPRING_2026)
    assert found.too_small == (0, 1)


def test_everything_fits() -> None:
    sizes = FitSizes((GIB,) * 4, (GIB // 2,) * 4, GIB, 100 * MIB)
    found = own_fit(sizes, [8 * GIB] * 2)
    assert sum(len(held) for held in found.experts) == 4
    assert found.head == 1


def test_a_dense_model_is_filled_from_the_end() -> None:
    sizes = FitSizes((GIB,) * 6, (0,) * 6, GIB, 0)
    found = own_fit(sizes, [3 * GIB, 2 * GIB], [0], options=IkOptions())
    assert found.layers == (None, None, 0, 0, 0, 1)
    assert found.head == 1
    assert DEFAULT_MARGIN_BYTES == GIB
    assert own_fit(sizes, [3 * GIB, 3 * GIB]).layers == (None, None, None, 0, 0, 1)


layer_bytes = st.integers(1, 400).map(lambda n: n * 64 * MIB)


@given(
    st.lists(st.tuples(layer_bytes, st.floats(0, 1)), min_size=1, max_size=40),
    st.lists(st.integers(0, 64), min_size=1, max_size=8),
    st.integers(0, 4096),
    st.booleans(),
)
def test_own_fit_keeps_the_order_of_layers_and_the_memory_limits(
    layers: list[tuple[int, float]], free_gib: list[int], margin_mib: int, counts: bool
) -> None:
    sizes = FitSizes(
        tuple(size for size, _ in layers), tuple(int(size * share) for size, share in layers), GIB, 512 * MIB
    )
    free = [gib * GIB for gib in free_gib]
    found = own_fit(sizes, free, [margin_mib * MIB], options=IkOptions(fit_counts_compute=counts))
    homes = [home for home in found.layers if home is not None]
    assert homes == sorted(homes)
    assert all(found.layers[layer] == gpu for gpu, held in enumerate(found.experts) for layer in held)
    needed = sum(sizes.layers) + sizes.head
    for gpu, room in enumerate(free):
        taken = sum(
            size - (0 if layer in found.experts[gpu] else sizes.experts[layer])
            for layer, size in enumerate(sizes.layers)
            if found.layers[layer] == gpu
        ) + (sizes.head if found.head == gpu else 0)
        tight = needed > sum(max(0, max(0, r - margin_mib * MIB) - sizes.compute) for r in free)
        assert taken <= max(0, room - margin_mib * MIB) or gpu in found.too_small or not tight
