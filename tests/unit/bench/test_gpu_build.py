"""What the proof runs on: the source that it needs, a build in parts, and a slice with Kimi's dimensions."""

from pathlib import Path

import numpy as np
from prove_build import PART_BYTES, found, pack, slim, unpack
from prove_slice import LAYERS, head, values, write

from support.llama_source import write_archive
from tokenmill.model.describe import describe
from tokenmill.model.gguf import read_headers
from tokenmill.model.gguf_write import encode
from tokenmill.native.builds.source import source_files
from tokenmill.units import GIB


def test_a_slim_archive_holds_the_same_source(tmp_path: Path) -> None:
    assert slim(write_archive(tmp_path), tmp_path / "slim.tar.gz") > 0
    assert dict(source_files(tmp_path / "slim.tar.gz")) == dict(source_files(tmp_path / "unpacked"))


def test_a_build_is_carried_in_parts(tmp_path: Path) -> None:
    made = tmp_path / "made"
    (made / "bin").mkdir(parents=True)
    noise = np.random.default_rng(0).bytes(PART_BYTES + 1000)
    (made / "bin" / "libllama.so.0").write_bytes(noise)
    (made / "bin" / "libllama.so").symlink_to("libllama.so.0")
    (made / "llama.h").write_text("header")
    assert found(made) is None
    (made / "bin" / "llama-server").write_text("server")
    assert found(made) is not None
    assert pack(made, tmp_path / "out") == 2
    assert all(path.stat().st_size <= PART_BYTES for path in (tmp_path / "out").iterdir())
    back = unpack(tmp_path / "out", tmp_path / "back")
    assert back is not None
    assert back.library is not None
    assert back.library.read_bytes() == noise
    assert unpack(tmp_path / "made", tmp_path / "nothing") is None


def test_the_slice_has_the_dimensions_of_the_whole() -> None:
    made = head()
    profile = describe((made.header,))
    assert profile.layers == LAYERS
    assert 38.8 * GIB < made.header.file_bytes < 38.9 * GIB
    experts = [tensor for tensor in made.header.tensors if "_exps." in tensor.name]
    assert {tensor.type for tensor in experts} == {"Q4_0"}
    assert {tensor.bytes for tensor in experts} == {384 * 2048 * 7168 * 18 // 32}
    assert len(experts) == 3 * (LAYERS - 1)


def test_a_file_is_written_by_several_processes_as_one_would(tmp_path: Path) -> None:
    rows = [
        ("token_embd.weight", (64, 96), "Q8_0"),
        ("blk.0.ffn_down.weight", (96, 64), "Q4_0"),
        ("blk.0.attn_norm.weight", (64,), "F32"),
        ("blk.1.exp_probs_b.bias", (4,), "F32"),
    ]
    made = encode({"general.architecture": "deepseek2"}, rows, "small")
    target = tmp_path / "small.gguf"
    assert write(target, made=made, processes=2) > 0
    data = target.read_bytes()
    assert len(data) == made.header.file_bytes
    for tensor in read_headers(target)[0].tensors:
        at = len(made.raw) + tensor.offset
        assert data[at : at + tensor.bytes] == b"".join(piece.tobytes() for piece in values(tensor)), tensor.name
    assert np.frombuffer(data[len(made.raw) + made.header.tensors[2].offset :], "<f4", 64).tolist() == [1.0] * 64
    assert write(target, made=made) == 0.0
    assert not list(tmp_path.glob("*.part"))
