"""The toolchain of a build: the choice of tools, missing ones, and the options of cmake."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.llama_source import stand_in
from tokenmill.errors import EngineError, NoSpace, UsageError
from tokenmill.native.builds import toolchain
from tokenmill.native.builds.recipe import LlamaCppRecipe
from tokenmill.native.builds.toolchain import (
    BuildTool,
    Toolchain,
    check_disk,
    choose_architectures,
    configuration,
    default_jobs,
    find_toolchain,
)

TOOL = BuildTool(Path("/usr/bin/tool"), "1.0")
TOOLS = Toolchain(TOOL, TOOL, TOOL, None)


def cards(monkeypatch: pytest.MonkeyPatch, *architectures: str) -> None:
    monkeypatch.setattr(toolchain, "architectures_here", lambda: architectures)


def test_cuda_is_the_default_with_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, "86", "90")
    assert choose_architectures(cuda=None) == ("86", "90")
    assert choose_architectures(cuda=True) == ("86", "90")
    assert choose_architectures(cuda=False) == ()
    assert choose_architectures(cuda=None, given=["120;90", "90"]) == ("120", "90")


def test_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch)
    assert choose_architectures(cuda=None) == ()
    assert choose_architectures(cuda=True, given=["90"]) == ("90",)
    with pytest.raises(UsageError) as caught:
        choose_architectures(cuda=True)
    assert "--cuda-architecture" in (caught.value.hint or "")


@pytest.mark.parametrize("word", ["9.0", "sm_90", "x"])
def test_architectures_are_numbers(word: str) -> None:
    with pytest.raises(UsageError, match=word):
        choose_architectures(cuda=True, given=[word])


def test_cpu_and_an_architecture_contradict() -> None:
    with pytest.raises(UsageError):
        choose_architectures(cuda=False, given=["90"])


def test_every_missing_program_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr(toolchain, "_CUDA_FOLDERS", ())
    for name in ("CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(EngineError) as caught:
        find_toolchain(cuda=True, asked=False)
    assert caught.value.code == "build_tools_missing"
    assert all(name in caught.value.message for name in ("cmake", "ninja", "C++ compiler", "nvcc"))
    assert caught.value.hint is not None
    assert "apt-get install cmake ninja-build g++" in caught.value.hint
    assert "--cpu" in caught.value.hint


def test_nvcc_alone_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, tmp_path)
    monkeypatch.setattr(toolchain, "_nvcc", lambda: None)
    with pytest.raises(EngineError) as caught:
        find_toolchain(cuda=True, asked=True)
    assert caught.value.code == "build_tools_missing"
    assert "cmake" not in caught.value.message
    assert "CUDACXX" in (caught.value.hint or "")
    assert find_toolchain(cuda=False, asked=True).nvcc is None


def test_an_old_cmake_is_not_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, tmp_path)
    monkeypatch.setenv("CMAKE_VERSION", "3.16.3")
    with pytest.raises(EngineError, match=r"3\.16\.3"):
        find_toolchain(cuda=False, asked=False)


def test_programs_of_the_running_environment_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, tmp_path)
    path = tmp_path / "programs"
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr("sys.executable", str(path / "python"))
    monkeypatch.setattr("shutil.which", only_in(path))
    assert find_toolchain(cuda=False, asked=False).cmake == BuildTool(path / "cmake", "cmake version 3.25.1")


def only_in(folder: Path) -> Callable[..., str | None]:
    """`which` of a machine whose PATH has a compiler and nothing else."""

    def which(name: str, path: str | None = None) -> str | None:
        if path == str(folder):
            return str(folder / name)
        return "/usr/bin/c++" if name == "c++" else None

    return which


def test_options_of_cmake() -> None:
    recipe = LlamaCppRecipe(Path, 4096)
    words = configuration(Path("/s"), Path("/b"), TOOLS, recipe.options(("86", "90")))
    assert "-DCMAKE_CUDA_ARCHITECTURES=86;90" in words
    assert "-DGGML_CUDA=ON" in words
    assert "-DGGML_NATIVE=ON" in words
    assert "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON" in words
    assert not any("CUDA=ON" in word for word in configuration(Path("/s"), Path("/b"), TOOLS, recipe.options(())))


def test_a_full_disk_is_noticed_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_disk(tmp_path / "not" / "there", cuda=False)
    monkeypatch.setitem(toolchain._DISK_BYTES, "cuda", 1 << 60)
    with pytest.raises(NoSpace):
        check_disk(tmp_path / "not" / "there", cuda=True)


def test_at_least_one_job() -> None:
    assert default_jobs(cuda=True) >= 1
