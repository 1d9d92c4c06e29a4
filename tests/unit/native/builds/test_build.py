"""The steps of a build, with fakes of cmake, ninja and the opened library. `make test-build` runs the real build."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from support.llama_source import stand_in, write_archive
from tokenmill.errors import EngineError, UsageError
from tokenmill.native.builds import build as building
from tokenmill.native.builds import finished, source
from tokenmill.native.builds.build import BuildOptions, BuildProgress, build
from tokenmill.native.builds.verify import OpenedLibrary, verify


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file with the calls of cmake and ninja."""
    monkeypatch.setattr(
        building, "verify", lambda *_, version, max_sequences: OpenedLibrary(version, max_sequences, ("CPU",))
    )
    return stand_in(monkeypatch, tmp_path)


@pytest.fixture
def options(tmp_path: Path) -> BuildOptions:
    return BuildOptions(tmp_path / "engines", tmp_path / "cache", write_archive(tmp_path), max_sequences=1024, jobs=3)


def count(calls: Path) -> int:
    return len(calls.read_text().splitlines())


def test_a_build_appears_when_it_is_whole(calls: Path, options: BuildOptions) -> None:
    progress: list[BuildProgress] = []
    result = build(options, progress.append)
    made = result.build
    assert not result.was_there
    assert made == finished.read(options.engines / made.name)
    assert made.name.endswith("-cpu-1024")
    assert (made.max_sequences, made.cuda_architectures, made.verified) == (1024, (), True)
    assert made.library.resolve().read_text() == "library\n"
    assert made.library.is_symlink()
    assert [event.phase for event in progress] == ["source", "configure", "compile", "compile", "verify"]
    assert [(event.done, event.total) for event in progress if event.phase == "compile"] == [(1, 2), (2, 2)]
    assert "-j3" in calls.read_text()
    assert not [path for path in options.engines.iterdir() if path.name.startswith(".building")]
    assert result.log is not None
    assert "[2/2] Linking" in result.log.read_text()


def test_the_same_build_is_not_made_twice(calls: Path, options: BuildOptions) -> None:
    first = build(options)
    again = build(options)
    assert again.was_there
    assert again.build == first.build
    assert count(calls) == 2
    assert not build(replace(options, force=True)).was_there
    assert not build(replace(options, max_sequences=2048)).was_there
    assert count(calls) == 6
    assert len(finished.finished(options.engines)) == 2


def test_a_changed_source_is_another_build(calls: Path, options: BuildOptions, tmp_path: Path) -> None:
    build(options)
    folder = tmp_path / "unpacked"
    assert build(replace(options, source=folder)).was_there
    (folder / "xllamacpp-1" / "thirdparty" / "llama.cpp" / "CMakeLists.txt").write_text("project(other)\n")
    assert not build(replace(options, source=folder)).was_there


def test_other_changes_are_another_build(calls: Path, options: BuildOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    build(options)
    monkeypatch.setattr(source, "CHANGES", {})
    assert not build(options).was_there
    assert build(options).was_there


def test_a_failed_build_shows_the_end_of_the_log_and_continues(
    calls: Path, options: BuildOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NINJA_FAILS", "1")
    with pytest.raises(EngineError) as caught:
        build(options)
    assert caught.value.code == "build_failed"
    assert "error: no such thing" in (caught.value.hint or "")
    assert str(options.engines) in caught.value.message
    assert finished.finished(options.engines) == ()
    (work,) = options.engines.glob(".building-*")
    (work / "tree" / "compiled.o").touch()
    monkeypatch.delenv("NINJA_FAILS")
    build(replace(options, keep_build_tree=True))
    assert (work / "tree" / "compiled.o").exists()


def test_other_compilers_start_again(
    calls: Path, options: BuildOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NINJA_FAILS", "1")
    with pytest.raises(EngineError):
        build(options)
    (work,) = options.engines.glob(".building-*")
    (work / "tree" / "compiled.o").touch()
    (tmp_path / "g++").write_text("#!/bin/sh\necho other 99.0\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    with pytest.raises(EngineError):
        build(options)
    assert not (work / "tree" / "compiled.o").exists()


def test_a_library_that_is_not_as_expected_is_not_published(
    calls: Path, options: BuildOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "verify", verify)  # the real one, which refuses a text file
    with pytest.raises(EngineError) as caught:
        build(options)
    assert caught.value.code == "build_failed"
    assert finished.finished(options.engines) == ()


def test_two_builds_do_not_run_at_the_same_time(calls: Path, options: BuildOptions) -> None:
    with building._lock(options.engines), pytest.raises(EngineError, match=str(os.getpid())) as caught:
        build(options)
    assert caught.value.code == "build_in_progress"
    build(options)


def test_a_signal_stops_the_compilers(
    calls: Path, options: BuildOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waits = tmp_path / "waits"
    monkeypatch.setenv("NINJA_WAITS", str(waits))
    code = (
        "import hashlib, sys; from pathlib import Path; from tokenmill.native.builds import build, source;"
        "from support.llama_source import HEADER;"
        "source.HEADER_SHA256 = hashlib.sha256(HEADER).hexdigest();"
        "build.build(build.BuildOptions(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), cuda=False))"
    )
    arguments = [str(options.engines), str(options.cache), str(options.source)]
    tests = str(Path(__file__).parents[3])
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=tests, stderr=subprocess.PIPE, text=True)
    while not waits.exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate()[1]
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(options.engines) not in running
    monkeypatch.delenv("NINJA_WAITS")
    assert not build(replace(options, max_sequences=4096)).was_there


@pytest.mark.parametrize("number", [255, 16385, 0])
def test_limits_of_the_limit(number: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=str(number)):
        BuildOptions(tmp_path, tmp_path, max_sequences=number)


def test_the_record_names_what_was_built(calls: Path, options: BuildOptions) -> None:
    made = build(options).build
    record = json.loads((made.folder / "build.json").read_text())
    assert record["max_sequences"] == 1024
    assert "GGML_CUDA=OFF" in record["options"]
    assert record["compiler"]
    assert len(record["library_sha256"]) == 64
