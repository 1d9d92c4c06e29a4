"""Fingerprints of placements, which similar placements share."""

from dataclasses import replace

import pytest

from support.plans import placed, settings
from support.run_models import model
from tokenmill.model.profile import TensorClass
from tokenmill.planner.placement import UNKNOWN, fingerprint, kinds

KIMI = model("kimi-k2.5:Q4_K_S")


@pytest.mark.parametrize(
    ("cards", "first", "resident", "expected"),
    [
        (0, 0, range(0), UNKNOWN),
        (1, 0, range(0), "experts dram, rest gpu0"),
        (1, 0, range(1, 31), "experts dram 50% gpu0 50%, rest gpu0"),
        (1, 0, range(61), "experts gpu0, rest gpu0"),
        (1, 31, range(0), "experts dram, rest dram 50% gpu0 50%"),
        (2, 0, range(0), "experts dram, rest gpu0 50% gpu1 50%"),
    ],
)
def test_fingerprints_of_placements(cards: int, first: int, resident: range, expected: str) -> None:
    plan = placed(KIMI, settings(), cards=cards, first=first, resident=resident)
    assert fingerprint(plan.profile, plan.placement) == expected


def test_fingerprints_ignore_single_layers() -> None:
    def named(count: int) -> str:
        plan = placed(KIMI, settings(), cards=1, resident=range(1, 1 + count))
        return fingerprint(plan.profile, plan.placement)

    assert named(30) == named(31)
    assert len({named(count) for count in (0, 1, 15, 30, 59, 60)}) == 6  # some, and all but some, are never none or all


def test_fingerprints_ignore_embeddings() -> None:
    plan = placed(KIMI, settings(), cards=1)
    homes = [
        "gpu0" if tensor.cls is TensorClass.EMBEDDING else home
        for tensor, home in zip(plan.profile.tensors, plan.placement.homes, strict=True)
    ]
    moved = replace(plan.placement, homes=tuple(homes))
    assert fingerprint(plan.profile, moved) == fingerprint(plan.profile, plan.placement)


def test_a_dense_model_has_no_experts() -> None:
    plan = placed(model("llama-3.3-70b:Q4_K_M"), settings(), cards=1)
    assert fingerprint(plan.profile, plan.placement) == "rest gpu0"


def test_kinds_are_fingerprints_without_shares() -> None:
    assert kinds("experts dram 50% gpu0 50%, rest gpu0") == kinds("experts dram 90% gpu0 10%, rest gpu0")
    assert kinds("experts dram, rest gpu0") != kinds("experts gpu0, rest gpu0")
    assert kinds(UNKNOWN) == UNKNOWN
