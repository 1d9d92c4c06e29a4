"""Models that load and answer quickly, for tests that ignore the content of answers."""

import struct
from pathlib import Path

from tokenmill.model.gguf import read_headers
from tokenmill.model.synthetic import generate


def write_moe(folder: Path) -> Path:
    """A mixture of experts of 4 MB with random weights; a word of a prompt is about four of its tokens."""
    path = folder / "moe.gguf"
    generate.write("moe", generate.sizes("moe", {"layers": 2, "embed": 128, "heads": 4, "head_dim": 32}), path)
    return path


def write_nan(folder: Path) -> Path:
    """The same model with NaN as the scale of one block of the output matrix, as flipped bits leave it.

    The logit of token 0 is NaN. A NaN in an earlier layer need not reach the logits: ggml quantizes activations, which
    turns it into a number.
    """
    path = write_moe(folder)
    header = read_headers(path)[0]
    output = next(tensor for tensor in header.tensors if tensor.name == "output.weight")
    assert output.type == "Q4_0"  # blocks of a half-precision scale and 32 values of 4 bits
    with path.open("r+b") as file:
        file.seek(header.data_offset + output.offset)
        file.write(struct.pack("<e", float("nan")))
    return path
