"""The source of a build: required files, where they are found, and patches."""

import hashlib
from pathlib import Path

import pytest

from support.llama_source import CHANGED, HEADER, LIMIT, write_archive, write_tree
from tokenmill.errors import EngineError, UsageError
from tokenmill.native.builds import source
from tokenmill.native.builds.source import CHANGES, digest, is_needed, patched, source_files, write_source


@pytest.fixture(autouse=True)
def small_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "HEADER_SHA256", hashlib.sha256(HEADER).hexdigest())


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
def test_needed_files(name: str, needed: bool) -> None:
    assert is_needed(name) is needed


def test_an_archive_and_its_folders_hold_the_same_source(tmp_path: Path) -> None:
    packed = write_archive(tmp_path)
    unpacked = tmp_path / "unpacked"
    places = (packed, unpacked, unpacked / "xllamacpp-1", unpacked / "xllamacpp-1" / "thirdparty" / "llama.cpp")
    found = {place: dict(source_files(place)) for place in places}
    assert all(files == found[packed] for files in found.values())
    assert set(found[packed]) == {
        "CMakeLists.txt",
        "include/llama.h",
        "src/llama-cparams.h",
        "src/llama-\xff.txt",
        *CHANGES,
    }
    assert len({digest(source_files(place)) for place in places}) == 1


def test_the_limit_is_raised_in_the_copy_only(tmp_path: Path) -> None:
    root = write_tree(tmp_path)
    before = digest(source_files(root))
    assert write_source(root, tmp_path / "copy", 4096) == before == digest(source_files(root))
    assert (tmp_path / "copy" / "src" / "llama-cparams.h").read_text() == LIMIT.replace("256", "4096")
    for name, pairs in CHANGES.items():
        text = (tmp_path / "copy" / name).read_text()
        assert [new for _, new in pairs if new not in text] == []
    assert not (tmp_path / "copy" / "tests").exists()


def test_files_that_are_there_are_not_touched(tmp_path: Path) -> None:
    root = write_tree(tmp_path)
    write_source(root, tmp_path / "copy", 4096)
    (tmp_path / "copy" / "CMakeLists.txt").write_text("changed")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    write_source(root, tmp_path / "copy", 4096)
    changed = [path.name for path, at in before.items() if path.stat().st_mtime_ns != at]
    assert changed == ["CMakeLists.txt"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("src/llama-cparams.h", LIMIT.replace("256", "512")),
        ("src/llama-cparams.h", LIMIT + LIMIT),
        ("src/llama-batch.cpp", CHANGED["src/llama-batch.cpp"].replace("if (mem) {", "if (memory) {")),
        ("src/llama-batch.cpp", CHANGED["src/llama-batch.cpp"].replace("cur_seq_set", "sets")),
        ("src/llama-kv-cells.h", CHANGED["src/llama-kv-cells.h"].replace("std::set", "std::multiset")),
    ],
)
def test_a_line_that_is_not_there_is_an_error(name: str, text: str) -> None:
    with pytest.raises(EngineError, match=name):
        patched(name, text.encode(), 4096)


def test_other_versions_are_refused(tmp_path: Path) -> None:
    root = write_tree(tmp_path)
    (root / "include" / "llama.h").write_bytes(HEADER + b"int more;\n")
    with pytest.raises(EngineError, match=str(root)):
        write_source(root, tmp_path / "copy", 4096)


def test_a_source_without_the_file_is_refused(tmp_path: Path) -> None:
    root = write_tree(tmp_path)
    (root / "src" / "llama-cparams.h").unlink()
    with pytest.raises(EngineError, match=r"src/llama-cparams\.h"):
        write_source(root, tmp_path / "copy", 4096)


def test_places_without_a_source(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.tar.gz").write_text("no archive")
    with pytest.raises(UsageError):
        list(source_files(tmp_path / "missing"))
    for name in ("empty", "text.tar.gz"):
        with pytest.raises(EngineError, match=name):
            list(source_files(tmp_path / name))


def test_a_cached_archive_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / source.SDIST).write_bytes(b"an archive")
    monkeypatch.setattr(source, "SDIST_SHA256", hashlib.sha256(b"an archive").hexdigest())
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    assert source.archive(tmp_path, progress=lambda *_: None, notify=lambda _: None) == tmp_path / source.SDIST
