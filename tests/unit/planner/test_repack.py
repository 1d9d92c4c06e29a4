"""Weights that are repacked for vector instructions; integration tests compare them with the wheel's llama.cpp."""

import pytest

from tokenmill.model.profile import Tensor, TensorClass
from tokenmill.planner.memory.weights import WHEEL_ISA, is_repacked, repacked

AVX512 = {"avx2", "avx512f"}
ARM = {"neon", "dotprod"}
ARM_I8MM = {"neon", "dotprod", "i8mm"}


@pytest.mark.parametrize(
    ("type", "on_wheel", "on_avx512", "on_arm"),
    [
        ("Q4_0", True, True, True),
        ("Q4_K", True, True, True),
        ("Q5_K", False, False, True),
        ("Q6_K", False, False, True),
        ("Q8_0", False, False, True),
        ("Q2_K", False, True, False),
        ("IQ4_NL", True, True, True),
        ("MXFP4", True, True, True),
        ("IQ4_XS", False, False, False),
        ("BF16", False, False, False),
    ],
)
def test_by_type_and_instructions(type: str, on_wheel: bool, on_avx512: bool, on_arm: bool) -> None:
    shape = (7168, 2048, 384)
    assert repacked(type, shape) == on_wheel
    assert repacked(type, shape, AVX512) == on_avx512
    assert repacked(type, shape, ARM) == repacked(type, shape, ARM_I8MM) == on_arm
    assert not repacked(type, shape, ())


def test_rows_must_be_whole_groups() -> None:
    assert not repacked("Q4_K", (512, 12), WHEEL_ISA)
    assert repacked("Q4_0", (512, 12), ARM)
    assert not repacked("Q4_0", (512,), ARM)


@pytest.mark.parametrize(
    ("cls", "shape", "expected"),
    [
        (TensorClass.ATTENTION, (7168, 1536), True),
        (TensorClass.ROUTED_EXPERTS, (7168, 2048, 384), True),
        (TensorClass.ATTENTION, (128, 512, 64), False),  # a stack that is multiplied as a whole: latent k_b and v_b
        (TensorClass.EMBEDDING, (7168, 163840), False),  # looked up
        (TensorClass.OUTPUT, (7168, 163840), True),
        (TensorClass.MTP, (5120, 1536, 160), False),  # not loaded
    ],
)
def test_by_use(cls: TensorClass, shape: tuple[int, ...], expected: bool) -> None:
    assert is_repacked(Tensor("blk.0.x.weight", cls, 0, shape, "Q4_K", 1, 1)) is expected
