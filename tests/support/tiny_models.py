"""Models that load and answer in a moment, for tests in which it does not matter what is answered."""

from pathlib import Path

from tokenmill.model import synth


def write_moe(folder: Path) -> Path:
    """A mixture of experts of 4 MB with random weights; a word of a prompt is about four of its tokens."""
    path = folder / "moe.gguf"
    synth.write("moe", synth.sizes("moe", {"layers": 2, "embed": 128, "heads": 4, "head_dim": 32}), path)
    return path
