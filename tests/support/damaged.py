"""A copy of a model with reduced precision: four-bit weights of its feed-forward layers rounded to three bits."""

import shutil
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader

_BLOCK_BYTES, _HEAD_BYTES = 20, 4  # of Q4_1: a scale and a minimum, then 32 weights
_KEPT = 0xEE  # all but the lowest bit of each half byte


def damaged(model: Path, target: Path) -> Path:
    """Write the copy; the model must have Q4_1 feed-forward weights."""
    shutil.copyfile(model, target)
    reader = GGUFReader(target, mode="r+")
    count = 0
    for tensor in reader.tensors:
        if tensor.tensor_type == GGMLQuantizationType.Q4_1 and ".ffn_" in tensor.name:
            blocks = np.asarray(tensor.data).reshape(-1, _BLOCK_BYTES)
            heads = blocks[:, :_HEAD_BYTES].copy().view(np.float16)
            heads[:, 1] += heads[:, 0] * np.float16(
                0.5
            )  # add the mean of the removed part, so that only noise is added
            blocks[:, :_HEAD_BYTES] = heads.view(np.uint8)
            blocks[:, _HEAD_BYTES:] &= np.uint8(_KEPT)
            count += 1
    assert count > 10
    reader.data.flush()
    return target
