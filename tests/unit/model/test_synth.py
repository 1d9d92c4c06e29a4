"""Synthetic models: sizes, reproducible bytes, distribution of weights, and errors."""

import hashlib
import tracemalloc
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGMLQuantizationType

from tokenmill.errors import UsageError
from tokenmill.model.gguf import read_header
from tokenmill.model.read import read
from tokenmill.model.synthetic import generate, weights
from tokenmill.model.synthetic.generate import SyntheticKind
from tokenmill.units import MIB

KINDS: tuple[SyntheticKind, ...] = get_args(SyntheticKind)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_make_a_small_file_of_the_length_its_header_says(kind: SyntheticKind, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    made = generate.write(kind, generate.sizes(kind, {}), path)
    header = read_header(path)
    assert path.stat().st_size == header.file_bytes == made.bytes
    assert 2 * MIB < made.bytes < 64 * MIB
    assert made.parameters == sum(tensor.elements for tensor in header.tensors)
    assert header.keys[generate.SYNTHETIC_KEY] is True
    assert list(tmp_path.iterdir()) == [path]


def test_sizes_reach_the_file(tmp_path: Path) -> None:
    asked = {
        "layers": 3,
        "embed": 256,
        "heads": 4,
        "head_dim": 64,
        "experts": 6,
        "used": 2,
        "expert_ff": 128,
        "dense_ff": 320,
        "vocab": 600,
        "context": 1234,
    }
    path = tmp_path / "model.gguf"
    generate.write("moe-mla", generate.sizes("moe-mla", dict(asked)), path, type="Q8_0")
    profile = read(path)
    assert (profile.layers, profile.embedding_length, profile.heads, profile.training_context) == (3, 256, 4, 1234)
    assert profile.experts is not None
    assert (profile.experts.count, profile.experts.used, profile.experts.shared) == (6, 2, 1)
    shapes = {tensor.name: tensor.shape for tensor in profile.tensors}
    assert shapes["token_embd.weight"] == (256, 600)
    assert shapes["blk.0.ffn_up.weight"] == (256, 320)
    assert shapes["blk.2.ffn_up_exps.weight"] == (256, 128, 6)
    assert {layer.k_elements for layer in profile.cache} == {4 * 64 + 32}


def test_default_latent_width_is_the_real_one(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    generate.write("moe-mla", generate.sizes("moe-mla", {}), path)
    assert {(layer.kind, layer.k_elements) for layer in read(path).cache} == {("latent", 576)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_bytes_and_another_does_not(kind: SyntheticKind, tmp_path: Path) -> None:
    sizes = generate.sizes(kind, {"layers": 2, "embed": 64, "vocab": 300})
    paths = [tmp_path / f"{number}.gguf" for number in range(3)]
    for path, seed in zip(paths, (7, 7, 8), strict=True):
        generate.write(kind, sizes, path, seed=seed)
    assert _digest(paths[0]) == _digest(paths[1]) != _digest(paths[2])


def test_bytes_do_not_change_between_releases(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    generate.write(
        "dense",
        generate.sizes("dense", {"layers": 1, "embed": 64, "heads": 1, "kv_heads": 1, "dense_ff": 64, "vocab": 260}),
        path,
    )
    with path.open("rb") as file:
        file.seek(read_header(path).data_offset)
        assert hashlib.sha256(file.read()).hexdigest()[:16] == "aeb3b8ce44b0a9ba"


def test_where_pieces_end_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in weights.TYPES:
        monkeypatch.setattr(weights, "PIECE_BYTES", 8 * MIB)
        whole = np.concatenate(list(weights.pieces("x", kind, (256, 100), 3, 0.02)))
        monkeypatch.setattr(weights, "PIECE_BYTES", 1000)
        assert np.array_equal(np.concatenate(list(weights.pieces("x", kind, (256, 100), 3, 0.02))), whole), kind


@pytest.mark.parametrize("kind", weights.TYPES)
def test_weights_have_the_requested_deviation_and_zero_mean(kind: str) -> None:
    raw = np.concatenate(list(weights.pieces("blk.0.x.weight", kind, (1024, 64), 1, 0.02)))
    values = quants.dequantize(raw.reshape(64, -1), GGMLQuantizationType[kind])
    assert np.isfinite(values).all()
    near = 0.45 if kind == "MXFP4" else 0.03  # its scales are powers of two
    assert abs(values.std() / 0.02 - 1) < near
    assert abs(values.mean()) < 0.001


def test_a_large_model_is_written_in_little_memory(tmp_path: Path) -> None:
    sizes = generate.sizes("moe", {"layers": 2, "embed": 1024, "experts": 64, "expert_ff": 512})
    tracemalloc.start()
    made = generate.write("moe", sizes, tmp_path / "model.gguf", type="Q8_0")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made.bytes > 200 * MIB
    assert peak < 64 * MIB


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    made = generate.write(
        "dense",
        generate.sizes("dense", {}),
        tmp_path / "model.gguf",
        progress=lambda done, total: heard.append((done, total)),
    )
    assert heard == sorted(heard)
    assert {total for _, total in heard} == {made.bytes}
    assert made.bytes - 32 < heard[-1][0] <= made.bytes


def test_rows_that_a_type_does_not_divide_get_a_substitute(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    generate.write("moe-mla", generate.sizes("moe-mla", {}), path, type="Q4_K")
    types = {tensor.name: tensor.type for tensor in read_header(path).tensors}
    assert types["blk.1.ffn_up_exps.weight"] == "Q4_K"
    assert types["blk.1.attn_k_b.weight"] == "Q5_0"
    assert types["blk.1.ffn_gate_inp.weight"] == "F32"


@pytest.mark.parametrize(
    ("kind", "asked", "words"),
    [
        ("dense", {"experts": 4}, "--experts"),
        ("moe", {"dense_ff": 4}, "--dense-ff"),
        ("moe-mla", {"kv_heads": 4}, "--kv-heads"),
        ("moe", {"used": 17}, "--used"),
        ("moe", {"heads": 8, "kv_heads": 3}, "--heads"),
        ("moe", {"head_dim": 30}, "--head-dim"),
        ("moe", {"embed": 100}, "--embed"),
        ("moe", {"vocab": 200}, "--vocab must be at least 260"),
        ("moe", {"layers": 0}, "got 0"),
        ("moe-mla", {"layers": 1}, "--layers must be at least 2"),
        ("moe-mla", {"layers": 27}, "DeepSeek-V2-Lite"),
        ("dense", {"layers": 10**20}, "--layers must be at most 512"),
        ("dense", {"vocab": 4_000_000_000}, "--vocab must be at most"),
        ("moe", {"experts": 1 << 32}, "--experts must be at most 1024"),
        ("moe", {"context": 1 << 32}, "--context must be at most"),
        ("moe", {"expert_ff": 1 << 32}, "--expert-ff must be at most"),
    ],
)
def test_impossible_sizes_are_refused(kind: SyntheticKind, asked: dict[str, int | None], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        generate.sizes(kind, asked)
    assert caught.value.hint


def test_a_seed_below_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--seed .*-1"):
        generate.write("dense", generate.sizes("dense", {}), tmp_path / "model.gguf", seed=-1)


def test_an_unknown_type_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="IQ1_S") as caught:
        generate.write("dense", generate.sizes("dense", {}), tmp_path / "model.gguf", type="IQ1_S")
    assert "Q4_0" in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []
