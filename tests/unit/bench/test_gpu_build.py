"""What the proof builds from and on: the source that is needed, a build in parts, and a slice with Kimi's dimensions."""

import tarfile
from pathlib import Path

import numpy as np
import pytest
from prove_build import PART_BYTES, configuration, found, is_needed, pack, slim, source_in, unpack
from prove_slice import LAYERS, head, values, write

from tokenmill.errors import TokenmillError
from tokenmill.model.describe import describe
from tokenmill.model.gguf import read_headers
from tokenmill.model.gguf_write import encode
from tokenmill.units import GIB


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("CMakeLists.txt", True),
        ("src/llama.cpp", True),
        ("ggml/src/ggml.c", True),
        ("ggml/src/ggml-backend.cpp", True),
        ("ggml/src/ggml-cuda/ggml-cuda.cu", True),
        ("ggml/src/ggml-cuda/template-instances/mmf-instance-ncols_8.cu", True),
        ("ggml/src/ggml-vulkan/ggml-vulkan.cpp", False),
        ("tools/server/server.cpp", True),
        ("tools/server/tests/unit/test_basic.py", False),
        ("tools/ui/ui.cpp.in", True),
        ("tools/ui/src/app.css", False),
        ("tools/mtmd/test-3.mp4", False),
        ("examples/simple/simple.cpp", False),
        ("gguf-py/gguf/lazy.py", False),
    ],
)
def test_what_of_the_source_is_needed(name: str, needed: bool) -> None:
    assert is_needed(name) is needed


def source(folder: Path) -> Path:
    inner = folder / "xllamacpp-1" / "thirdparty" / "llama.cpp"
    for name in ("CMakeLists.txt", "include/llama.h", "src/llama.cpp", "tests/test.cpp"):
        (inner / name).parent.mkdir(parents=True, exist_ok=True)
        (inner / name).write_text(name)
    return inner


def test_the_source_is_found_in_a_distribution_and_in_what_is_left_of_it(tmp_path: Path) -> None:
    inner = source(tmp_path / "whole")
    assert source_in(tmp_path / "whole", tmp_path / "unused") == inner
    with tarfile.open(tmp_path / "sdist.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "whole" / "xllamacpp-1", arcname="xllamacpp-1")
    assert slim(tmp_path / "sdist.tar.gz", tmp_path / "slim.tar.gz") > 0
    cut = source_in(tmp_path / "slim.tar.gz", tmp_path / "cut")
    assert cut == tmp_path / "cut" / "llama.cpp"
    assert (cut / "src" / "llama.cpp").is_file()
    assert not (cut / "tests").exists()
    with pytest.raises(TokenmillError, match="holds no llama"):
        source_in(tmp_path / "cut" / "llama.cpp" / "src", tmp_path / "unused")


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


def test_cuda_is_built_for_the_card_that_is_there() -> None:
    words = configuration(Path("/s"), Path("/b"), "90")
    assert "-DCMAKE_CUDA_ARCHITECTURES=90" in words
    assert "-DGGML_CUDA=ON" in words
    assert not any("CUDA=ON" in word for word in configuration(Path("/s"), Path("/b"), None))


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
