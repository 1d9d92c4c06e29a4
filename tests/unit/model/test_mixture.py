"""Types of tensors in each mix against llama-quantize's (tests/data/quantize)."""

import csv
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from tokenmill.errors import UsageError
from tokenmill.model import catalog, quant_mix
from tokenmill.model.description import Description
from tokenmill.model.tensor_types import tensor_bytes

CHOICES = Path(__file__).parents[2] / "data" / "quantize" / "choices.tsv"


def _with_keys(name: str, **keys: int) -> Description:
    entry = catalog.entry(name).model
    return replace(entry, keys={**entry.keys, **keys})


VARIANTS: dict[str, Callable[[], Description]] = {
    "eight-experts": lambda: _with_keys("qwen3-235b-a22b", expert_count=8, block_count=32),
    "tied-output": lambda: replace(
        catalog.entry("qwen3-32b").model, extras=replace(catalog.entry("qwen3-32b").model.extras, tied_output=True)
    ),
    "two-queries-per-kv-head": lambda: _with_keys("qwen3-32b", **{"attention.head_count_kv": 32}),
    "odd-rows": lambda: _with_keys("qwen3-32b", embedding_length=5184, feed_forward_length=25632),
}


def _choices() -> dict[str, list[dict[str, str]]]:
    table: dict[str, list[dict[str, str]]] = {}
    with CHOICES.open() as file:
        for row in csv.DictReader(file, delimiter="\t"):
            table.setdefault(row["model"], []).append(row)
    return table


def test_the_captured_choices_cover_every_mix() -> None:
    table = _choices()
    assert set(table) <= {*catalog.names(), *VARIANTS}
    for rows in table.values():
        assert {row["mix"] for row in rows} == set(quant_mix.FILE_TYPES) - {"F32"}


@pytest.mark.parametrize("model", sorted(_choices()))
def test_every_tensor_gets_the_type_that_llama_quantize_gives_it(model: str) -> None:
    entry = VARIANTS[model]() if model in VARIANTS else catalog.entry(model).model
    slots, traits = entry.slots(), entry.traits()
    for row in _choices()[model]:
        types = quant_mix.choose(row["mix"], slots, traits, {})
        listing = "".join(f"{name} {kind}\n" for (name, _), kind in zip(slots, types, strict=True))
        size = sum(tensor_bytes(kind, shape) for (_, shape), kind in zip(slots, types, strict=True))
        assert f"{size / (1 << 20):.2f}" == row["mib"], row["mix"]
        assert sha256(listing.encode()).hexdigest()[:16] == row["sha256_16"], row["mix"]


def test_the_first_matching_pattern_decides() -> None:
    slots = [("blk.0.ffn_up_exps.weight", (256, 256, 4)), ("blk.0.attn_q.weight", (256, 256))]
    traits = quant_mix.MixTraits(layers=1, experts=4)
    assert quant_mix.choose("Q8_0", slots, traits, {"_exps": "Q4_0", "ffn": "Q2_K"}) == ["Q4_0", "Q8_0"]


def test_patterns_never_touch_norms_biases_and_routers() -> None:
    slots = [
        ("blk.0.attn_norm.weight", (256,)),
        ("blk.0.attn_q.bias", (256,)),
        ("blk.0.ffn_gate_exps.bias", (256, 4)),
        ("blk.0.ffn_gate_inp.weight", (256, 4)),
    ]
    traits = quant_mix.MixTraits(layers=1)
    assert quant_mix.choose("Q4_K_M", slots, traits, {".": "Q4_0"}) == ["F32"] * 4


@pytest.mark.parametrize(
    ("layers", "raised"),
    [(8, [0, 3, 6, 7]), (32, [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31])],
)
def test_the_layers_that_get_more_bits(layers: int, raised: list[int]) -> None:
    assert [layer for layer in range(layers) if quant_mix.more_bits(layer, layers)] == raised


def test_an_unknown_mix_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        quant_mix.choose("Q9_K", [], quant_mix.MixTraits(layers=1), {})
    assert "Q4_K_M" in str(caught.value.hint)
