"""A slice of Kimi-K2.5 with random weights: its real dimensions and tensor types, and its first few layers.

The header is the catalogue's, with fewer layers and a usable vocabulary. The weights are generated as blocks of each
type, one process per tensor, so that 39 GiB take as long as writing them to the page cache.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokenmill.model import catalog, quant_mix
from tokenmill.model.description import Description
from tokenmill.model.gguf import TensorEntry
from tokenmill.model.gguf_write import Encoded, Plain, TensorRow, encode
from tokenmill.model.synthetic import generate, vocabulary, weights
from tokenmill.model.tensor_table.slots import file_order

MODEL = "kimi-k2.5"
QUANT = "Q4_X"
LAYERS = 5  # one dense layer and four with 9.06 GiB of experts: 38.9 GiB
TINY = generate.Sizes(
    layers=4,
    embed=512,
    heads=4,
    head_dim=64,
    experts=32,
    used=4,
    expert_ff=256,
    dense_ff=1024,
    vocab=4096,
    context=65536,
)


def head(layers: int = LAYERS) -> Encoded:
    """The slice's file up to its first tensor."""
    whole = catalog.entry(MODEL).model
    cut = replace(whole, keys={**whole.keys, "block_count": layers})
    general: dict[str, Plain] = {
        "general.architecture": cut.architecture,
        "general.type": "model",
        "general.name": f"{whole.title}, {layers} of its {whole.keys['block_count']} layers",
        "general.file_type": cut.mixes[QUANT].file_type or 0,
        "general.quantization_version": 2,
        generate.SYNTHETIC_KEY: True,
    }
    return encode({**general, **cut.full_keys(), **_words(cut)}, _tensors(cut), f"{MODEL}:{QUANT}, {layers} layers")


def _tensors(cut: Description) -> tuple[TensorRow, ...]:
    slots = cut.slots()
    mix = cut.mixes[QUANT]
    types = quant_mix.choose(mix.base, slots, cut.traits(), {**cut.pinned, **mix.patterns})
    rows = [(name, shape, kind) for (name, shape), kind in zip(slots, types, strict=True)]
    return tuple(sorted(rows, key=lambda row: file_order(row[0])))


def _words(cut: Description) -> dict[str, Plain]:
    words = cut.words
    built = vocabulary.build(words.tokens, words.special, speakable=True)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": words.pre,
        "tokenizer.ggml.tokens": built.tokens,
        "tokenizer.ggml.token_type": built.types,
        "tokenizer.ggml.merges": built.merges,
        **{f"tokenizer.ggml.{role}_token_id": token for role, token in words.ids.items()},
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": words.template or "",
    }


def write(target: Path, *, layers: int = LAYERS, processes: int | None = None, made: Encoded | None = None) -> float:
    """Write the slice if it is missing; returns the seconds that it took."""
    made = made or head(layers)
    if target.exists() and target.stat().st_size == made.header.file_bytes:
        return 0.0
    began = time.monotonic()
    part = target.with_suffix(".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    with part.open("wb") as file:
        file.write(made.raw)
        file.truncate(made.header.file_bytes)
    start = len(made.raw)
    largest_first = sorted(made.header.tensors, key=lambda tensor: -tensor.bytes)
    workers = processes or min(16, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_fill, [part] * len(largest_first), [start] * len(largest_first), largest_first))
    part.replace(target)
    return time.monotonic() - began


def _fill(path: Path, start: int, tensor: TensorEntry) -> None:
    at = start + tensor.offset
    file = os.open(path, os.O_WRONLY)
    try:
        for piece in values(tensor):
            view = memoryview(np.ascontiguousarray(piece).data).cast("B")
            while view:
                done = os.pwrite(file, view, at)
                at = at + done
                view = view[done:]
    finally:
        os.close(file)


def values(tensor: TensorEntry) -> Iterator[NDArray[np.uint8]]:
    """Norms are one, biases zero; matrices preserve the magnitude of activations."""
    if not tensor.name.endswith(".weight"):
        return iter([weights.constant(tensor.shape, 0.0)])
    if len(tensor.shape) == 1:
        return iter([weights.constant(tensor.shape, 1.0)])
    deviation = 1.0 if tensor.name == "token_embd.weight" else tensor.shape[0] ** -0.5
    return weights.pieces(tensor.name, tensor.type, tensor.shape, 0, deviation)


def write_tiny(target: Path) -> float:
    """A mixture of experts of a few megabytes, for machines without a GPU."""
    if target.exists():
        return 0.0
    began = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    generate.write("moe-mla", TINY, target)
    return time.monotonic() - began
