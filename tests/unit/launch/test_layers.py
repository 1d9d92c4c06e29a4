"""-ngl and -ts compared with a second implementation of llama.cpp's rule, in single precision."""

from bisect import bisect_right

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.dialect_plans import placed, small_profile
from tokenmill.errors import NotSpellable
from tokenmill.launch.layers import ALL_LAYERS, devices, gpu_order, layer_count, layer_flags


def rule(layers: int, ngl: int, split: list[float], gpus: int) -> list[int | None]:
    """load_tensors in src/llama-model.cpp of b11549, line by line; all values are 32-bit floats."""
    splits = np.zeros(gpus, dtype=np.float32)
    total = np.float32(0)
    for index in range(gpus):
        total = np.float32(total + np.float32(split[index]))
        splits[index] = total
    splits = splits / total
    start = max(layers + 1 - ngl, 0)
    active = min(ngl, layers + 1)
    found: list[int | None] = []
    for index in range(layers + 1):
        if index < start or index - start >= active:
            found.append(None)
        else:
            found.append(bisect_right(splits.tolist(), float(np.float32(index - start) / np.float32(active))))
    return found


@given(
    layers=st.integers(1, 130),
    ngl=st.integers(0, 140),
    split=st.lists(st.floats(0, 100, width=32), min_size=1, max_size=9).filter(lambda s: sum(s) > 0.01),
)
def test_devices_are_those_of_llama_cpp(layers: int, ngl: int, split: list[float]) -> None:
    assert list(devices(layers, ngl, split, len(split))) == rule(layers, ngl, split, len(split))


@pytest.mark.parametrize(
    ("ngl", "output_first", "expected"),
    [
        (999, True, (0, 0, 0, 1, 1)),
        (999, False, (0, 0, 0, 1, 1)),
        (3, True, (None, None, 0, 0, 1)),  # two layers and the output
        (3, False, (None, 0, 0, 1, None)),  # three layers, the output stays
        (1, True, (None, None, None, None, 0)),
        (0, True, (None,) * 5),
    ],
)
def test_the_output_counts_in_llama_cpp_and_not_in_its_fork(
    ngl: int, output_first: bool, expected: tuple[int | None, ...]
) -> None:
    assert devices(4, ngl, (), 2, output_first=output_first) == expected


@st.composite
def contiguous(draw: st.DrawFn) -> tuple[list[str], str]:
    """Contiguous ranges of layers: the CPU's first, then each GPU's, in any order of GPUs."""
    count = draw(st.integers(1, 70))
    order = draw(st.permutations(range(8)))
    cuts = sorted(draw(st.lists(st.integers(0, count), min_size=0, max_size=7)))
    host = draw(st.integers(0, count))
    layers = ["dram" if i < host else f"gpu{order[bisect_right(cuts, i)]}" for i in range(count)]
    return layers, draw(st.sampled_from(sorted({*layers[-1:], "dram"})))


@given(contiguous(), st.integers(0, 2), st.booleans())
def test_split_gives_back_every_layer(run: tuple[list[str], str], mtp: int, output_first: bool) -> None:
    layers, head = run
    profile = small_profile(len(layers), mtp=mtp)
    placement = placed(profile, layers, head)
    flags = layer_flags(placement, profile, output_first=output_first)
    assert flags.gpus == gpu_order(placement)
    again = devices(
        layer_count(profile), flags.gpu_layers, flags.tensor_split, len(flags.gpus), output_first=output_first
    )
    tiers = ["dram" if gpu is None else flags.gpus[gpu] for gpu in again]
    assert tiers[: len(layers)] == layers
    if output_first and head == layers[-1]:
        assert tiers[-1] == head


def test_all_layers_are_written_as_people_write_them() -> None:
    profile = small_profile(6)
    flags = layer_flags(placed(profile, ["gpu0"] * 6, "gpu0"), profile)
    assert (flags.gpu_layers, flags.tensor_split) == (ALL_LAYERS, ())


def test_uneven_runs_keep_their_counts() -> None:
    profile = small_profile(10)
    flags = layer_flags(placed(profile, ["gpu2"] * 3 + ["gpu0"] * 7, "gpu0"), profile)
    assert flags.gpus == ("gpu2", "gpu0")
    assert flags.tensor_split == (3, 8)  # the output rides with the last layer


@pytest.mark.parametrize(
    "layers",
    [["gpu0", "gpu1", "gpu0"], ["gpu0", "dram", "gpu0"], ["gpu0", "gpu0", "dram"]],
)
def test_runs_that_no_split_expresses_are_refused(layers: list[str]) -> None:
    profile = small_profile(3)
    with pytest.raises(NotSpellable, match="-ngl and -ts"):
        layer_flags(placed(profile, layers, "gpu0"), profile)
