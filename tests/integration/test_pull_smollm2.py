"""The real model through this machine's real package index."""

from pathlib import Path

from tokenmill.config import Config
from tokenmill.model.pull import locate
from tokenmill.model.pull.store import sha256_of
from tokenmill.model.pull.wheel import WHEELS


def test_smollm2_is_the_model_that_is_pinned(smollm2_path: Path) -> None:
    pinned = WHEELS["smollm2"]
    assert smollm2_path.stat().st_size == pinned.bytes
    assert sha256_of(smollm2_path) == pinned.sha256
    assert smollm2_path.read_bytes()[:4] == b"GGUF"
    assert locate("smollm2", Config().models_path) == smollm2_path
