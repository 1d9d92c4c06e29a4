"""Which model files are the same model."""

import time
from pathlib import Path

import pytest

from support.gguf_bytes import TINY_KEYS, TINY_TABLE, write
from support.safetensors_folder import write_folder
from tokenmill.errors import MissingSplit, UnknownModel
from tokenmill.model.identity import BLOCK_BYTES, identity_of
from tokenmill.units import GIB

CONFIG = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64}
TABLE = {
    "model.embed_tokens.weight": ("BF16", (1000, 64)),
    "model.layers.0.mlp.up_proj.weight": ("BF16", (64, 640)),
    "lm_head.weight": ("BF16", (1000, 64)),
}


def change(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_name_and_folder_do_not_count(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a.gguf", TINY_KEYS, TINY_TABLE), tmp_path / "sub" / "b.gguf"
    other.parent.mkdir()
    other.write_bytes(one.read_bytes())
    assert identity_of(one) == identity_of(other) == identity_of(str(one))
    assert identity_of(other.parent) == identity_of(other)
    assert len(identity_of(one)) == 64


def test_header_and_weights_count(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", TINY_KEYS, TINY_TABLE)
    seen = {identity_of(path)}
    # In a small file the blocks cover everything.
    assert path.stat().st_size < 64 * BLOCK_BYTES
    for at in (path.stat().st_size - 1, path.stat().st_size // 2, path.stat().st_size // 3):
        change(path, at)
        seen.add(identity_of(path))
    seen.add(identity_of(write(path, TINY_KEYS | {"general.name": "other"}, TINY_TABLE)))
    assert len(seen) == 5


def test_splits_are_one_model(tmp_path: Path) -> None:
    paths = []
    for number in (0, 1):
        keys = (TINY_KEYS if number == 0 else {"general.architecture": "llama"}) | {
            "split.no": number,
            "split.count": 2,
        }
        table = TINY_TABLE[::2] if number == 0 else TINY_TABLE[1::2]
        paths.append(write(tmp_path / f"m-{number + 1:05}-of-00002.gguf", keys, table))
    whole = identity_of(paths[0])
    assert identity_of(paths[1]) == whole
    change(paths[1], paths[1].stat().st_size - 10)
    assert identity_of(paths[0]) != whole
    paths[1].unlink()
    with pytest.raises(MissingSplit):
        identity_of(paths[0])


def test_a_giant_takes_no_time(tmp_path: Path) -> None:
    rows = 500 * GIB // (2 * 4096)
    path = write(tmp_path / "giant.gguf", TINY_KEYS, [*TINY_TABLE, ("output.weight", (4096, rows), "F16")])
    assert path.stat().st_size > 500 * GIB
    started = time.monotonic()
    whole = identity_of(path)
    assert time.monotonic() - started < 5
    change(path, path.stat().st_size - 1)
    assert identity_of(path) != whole


@pytest.mark.parametrize("shards", [1, 2])
def test_safetensors(tmp_path: Path, shards: int) -> None:
    folder = write_folder(tmp_path / "model", TABLE, CONFIG, shards=shards)
    whole = identity_of(folder)
    same = write_folder(tmp_path / "again", TABLE, CONFIG, shards=shards)
    assert identity_of(same) == whole
    (folder / "README.md").write_text("hello")
    assert identity_of(folder) == whole
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with_template = identity_of(folder)
    assert with_template != whole
    weights = sorted(same.glob("*.safetensors"))[-1]
    change(weights, weights.stat().st_size - 1)
    assert identity_of(same) != whole


def test_what_is_not_here_has_none() -> None:
    for name in ("kimi-k2.5:Q4_K_S", "https://example.com/model.gguf"):
        with pytest.raises(UnknownModel) as caught:
            identity_of(name)
        assert name in caught.value.message
