"""Tensor patterns reproduce a placement exactly, with few clauses."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.dialect_plans import EXPERT_NAMES, LAYER_NAMES, placed, small_profile, tensor
from tokenmill.errors import UsageError
from tokenmill.launch.layers import devices, gpu_order, layer_count, layer_flags
from tokenmill.launch.tensor_patterns import layers_regex, patterns, resolve, tiers_by_pattern
from tokenmill.model.profile import ModelFile, Profile, TensorClass
from tokenmill.model.read import read
from tokenmill.planner.plan import Placement


@given(st.sets(st.integers(0, 250), min_size=1))
def test_numbers_become_a_regex_of_exactly_those(numbers: set[int]) -> None:
    regex = re.compile(f"({layers_regex(numbers)})")
    assert {number for number in range(300) if regex.fullmatch(str(number))} == numbers


@pytest.mark.parametrize(
    ("numbers", "regex"),
    [
        (range(10, 25), "1[0-9]|2[0-4]"),
        (range(61), "[0-9]|[1-5][0-9]|60"),
        ([7], "7"),
        ([1, 2, 4], "[124]"),
        (range(3, 10), "[3-9]"),
        ([9, 10], "9|10"),
        (range(95, 104), "9[5-9]|10[0-3]"),
    ],
)
def test_numbers_are_readable(numbers: range | list[int], regex: str) -> None:
    assert layers_regex(numbers) == regex


@st.composite
def placements(draw: st.DrawFn) -> tuple[Profile, Placement]:
    """Contiguous ranges of layers, as -ts allows, and any placement of tensors."""
    count, mtp = draw(st.integers(1, 24)), draw(st.integers(0, 1))
    profile = small_profile(count, dense=draw(st.integers(0, 2)), mtp=mtp)
    host, cut = draw(st.integers(0, count)), draw(st.integers(0, count))
    layers = ["dram" if i < host else "gpu0" if i < cut else "gpu1" for i in range(count)]
    placement = placed(
        profile, layers, draw(st.sampled_from(["gpu0", "gpu1", "dram"])), draw(st.sets(st.integers(0, count)))
    )
    homes = list(placement.homes)
    tiers = st.sampled_from(["gpu0", "gpu1", "dram", "disk"])
    for index, home in draw(st.dictionaries(st.integers(0, len(homes) - 1), tiers, max_size=6)).items():
        homes[index] = home
    return profile, Placement(tuple(homes), placement.layers, placement.head)


def by_rule(profile: Profile, placement: Placement, *, output_first: bool) -> list[str]:
    flags, order = layer_flags(placement, profile, output_first=output_first), gpu_order(placement)
    placed_by = devices(
        layer_count(profile), flags.gpu_layers, flags.tensor_split, len(order), output_first=output_first
    )
    tiers = ["dram" if gpu is None else order[gpu] for gpu in placed_by]
    return [
        "dram" if row.cls is TensorClass.EMBEDDING else tiers[-1] if row.layer is None else tiers[row.layer]
        for row in profile.tensors
    ]


@settings(max_examples=200)
@given(placements(), st.booleans())
def test_patterns_on_top_of_the_rule_give_the_placement_back(
    drawn: tuple[Profile, Placement], output_first: bool
) -> None:
    profile, placement = drawn
    clauses = patterns(placement, profile, output_first=output_first)
    left = by_rule(profile, placement, output_first=output_first)
    got = [resolve(row.name, clauses) or base for row, base in zip(profile.tensors, left, strict=True)]
    assert got == [home if home.startswith("gpu") else "dram" for home in placement.homes]
    assert not any("," in regex or "=" in regex for regex, _ in clauses), "-ot splits at both"


@given(placements())
def test_full_description_needs_nothing_else(drawn: tuple[Profile, Placement]) -> None:
    profile, placement = drawn
    clauses = tiers_by_pattern(placement, profile)
    assert tuple(resolve(row.name, clauses) for row in profile.tensors) == placement.homes


def test_experts_on_the_host_are_one_clause() -> None:
    profile = small_profile(12)
    assert patterns(placed(profile, ["gpu0"] * 12, "gpu0"), profile) == [("exps", "dram")]


def test_one_clause_a_gpu_and_a_last_one_for_the_rest() -> None:
    profile = small_profile(40)
    layers = ["gpu0"] * 20 + ["gpu1"] * 20
    placement = placed(profile, layers, "gpu1", {*range(1, 5), *range(20, 25)})
    assert patterns(placement, profile) == [
        (r"blk\.[1-4]\.ffn_.*_exps\.", "gpu0"),
        (r"blk\.2[0-4]\.ffn_.*_exps\.", "gpu1"),
        ("exps", "dram"),
    ]


def test_everything_on_gpus_needs_no_clause() -> None:
    profile = small_profile(8)
    assert patterns(placed(profile, ["gpu0"] * 4 + ["gpu1"] * 4, "gpu1", range(8)), profile) == []


def test_idle_prediction_layers_are_kept_off_the_gpu() -> None:
    profile = small_profile(8, mtp=1)
    assert patterns(placed(profile, ["gpu0"] * 8, "gpu0", range(8)), profile)[0] == (r"blk\.8\.", "dram")


def test_the_output_elsewhere_is_an_exception() -> None:
    profile = small_profile(4)
    clauses = patterns(placed(profile, ["gpu0"] * 4, "dram", range(4)), profile)
    assert clauses == [(r"^output_norm\.weight$", "dram"), (r"^output\.weight$", "dram")]


def test_a_trillion_parameters_on_eight_cards_are_nine_clauses() -> None:
    profile = read("kimi-k2.5:Q4_K_S")
    layers = [f"gpu{min(layer // 8, 7)}" for layer in range(profile.layers)]
    clauses = patterns(placed(profile, layers, "gpu7", {1, 8, 16, 24, 32, 40, 48, 56}), profile)
    assert len(clauses) == 9
    assert clauses[-1] == ("exps", "dram")


def test_checkpoints_named_otherwise_are_described_too() -> None:
    names = [
        f"model.layers.{layer}.{name}"
        for layer in range(12)
        for name in ("self_attn.q_proj.weight", "mlp.experts.0.up_proj.weight", "mlp.experts.1.up_proj.weight")
    ]
    rows = [
        tensor(
            name, TensorClass.ROUTED_EXPERTS if "experts" in name else TensorClass.ATTENTION, int(name.split(".")[2])
        )
        for name in names
    ]
    rows.append(tensor("lm_head.weight", TensorClass.OUTPUT, None))
    profile = Profile("m", "safetensors", "test", tuple(rows), (ModelFile("m", 1),), 12, ())
    homes = tuple("dram" if "experts" in row.name and (row.layer or 0) > 4 else "gpu0" for row in rows)
    clauses = tiers_by_pattern(Placement(homes, ("gpu0",) * 12, "gpu0"), profile)
    assert tuple(resolve(row.name, clauses) for row in rows) == homes
    assert len(clauses) == 4


def test_first_match_wins_anywhere_in_the_name() -> None:
    clauses = [("ffn_down", "gpu1"), ("exps", "dram")]
    names = {"blk.3.ffn_down_exps.weight": "gpu1", "blk.3.ffn_up_exps.weight": "dram", "blk.3.attn_q.weight": None}
    assert {name: resolve(name, clauses) for name in names} == names


def test_a_broken_regex_is_said() -> None:
    with pytest.raises(UsageError, match="not a regular expression"):
        resolve("blk.0.attn_q.weight", [("blk.(0", "gpu0")])


def test_layer_names_used_here_are_real() -> None:
    shorts = {row.name.partition(f"blk.{row.layer}.")[2] for row in read("kimi-k2.5:Q4_K_S").tensors if row.layer == 1}
    assert {*EXPERT_NAMES, "ffn_gate_inp.weight", "exp_probs_b.bias"} <= shorts
    assert len(set(LAYER_NAMES)) == len(LAYER_NAMES)
