"""Catalogue models of a stated size."""

import pytest

from tokenmill.errors import UnknownModel
from tokenmill.model.profile import TensorClass
from tokenmill.model.read import read
from tokenmill.units import GIB


def test_a_size_replaces_the_quantization() -> None:
    profile = read("deepseek-v3@219GiB")
    assert profile.bytes == pytest.approx(219 * GIB, rel=1e-4)
    routed = sum(tensor.bytes for tensor in profile.of(TensorClass.ROUTED_EXPERTS))
    assert routed / profile.bytes > 0.9


def test_bits_per_weight() -> None:
    assert read("deepseek-v3@4.5bpw").bits_per_weight == pytest.approx(4.5, rel=1e-3)


def test_a_quantization_keeps_its_types_at_another_size() -> None:
    exact, resized = read("llama-3.3-70b:Q4_K_M"), read("llama-3.3-70b:Q4_K_M@45GiB")
    assert resized.bytes == pytest.approx(45 * GIB, rel=1e-4)
    assert [tensor.type for tensor in exact.tensors] == [tensor.type for tensor in resized.tensors]


@pytest.mark.parametrize("size", ["nothing", "0bpw", "1GiB"])
def test_impossible_sizes_are_refused(size: str) -> None:
    with pytest.raises(UnknownModel):
        read(f"deepseek-v3@{size}")
