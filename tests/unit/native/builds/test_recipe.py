"""Sources of builds: ik_llama.cpp's from a folder or a git repository."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from support.finished_builds import write_build
from tokenmill.config import EngineConfig
from tokenmill.errors import EngineError, UsageError
from tokenmill.native.builds import finished
from tokenmill.native.builds.build import BuildOptions
from tokenmill.native.builds.finished import BuildMachine, chosen, with_build
from tokenmill.native.builds.recipe import IkLlamaRecipe, ik_source
from tokenmill.native.builds.toolchain import Processor

IK_HEADER = "bool llama_kv_cache_seq_rm(void);\nstruct llama_context_params { int mla_attn; };\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "ik"
    (folder / "include").mkdir(parents=True)
    (folder / "examples").mkdir()
    (folder / "include" / "llama.h").write_text(IK_HEADER)
    (folder / "CMakeLists.txt").write_text("project(llama)\n")
    (folder / "examples" / "main.cpp").write_text("int main() {}\n")
    return folder


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_only_what_the_library_needs_is_copied(checkout: Path, tmp_path: Path) -> None:
    recipe = IkLlamaRecipe(checkout)
    digest = recipe.write(tmp_path / "copy")
    copied = sorted(path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*.*"))
    assert copied == ["CMakeLists.txt", "include/llama.h"]
    assert digest == recipe.digest()
    assert recipe.name(()) == f"ik_llama.cpp-{digest[:12]}-cpu"


def test_a_clone_is_named_by_its_commit_and_updated(checkout: Path, tmp_path: Path) -> None:
    git(checkout, "init", "--quiet")
    for number in range(2):
        (checkout / "CMakeLists.txt").write_text(f"project(llama{number})\n")
        git(checkout, "add", "-A")
        git(checkout, "commit", "--quiet", "-m", f"change {number}")
        clone = ik_source(f"file://{checkout}", tmp_path / "cache", lambda _: None)
        recipe = IkLlamaRecipe(clone)
        assert recipe.name(("90",)) == f"ik_llama.cpp-{git(checkout, 'rev-parse', '--short=12', 'HEAD')}-cuda90"
        assert (clone / "CMakeLists.txt").read_text() == f"project(llama{number})\n"


def test_errors_of_the_source(checkout: Path, tmp_path: Path) -> None:
    (checkout / "include" / "llama.h").write_text("struct llama_context_params { int n_ctx; };")
    with pytest.raises(UsageError) as caught:
        IkLlamaRecipe(checkout)
    assert caught.value.code == "source_not_ik_llama"
    with pytest.raises(EngineError) as failed:
        ik_source(f"file://{tmp_path}/missing", tmp_path / "cache", lambda _: None)
    assert failed.value.code == "clone_failed"
    with pytest.raises(UsageError) as missing:
        BuildOptions(tmp_path, tmp_path, ik=True)
    assert missing.value.code == "source_missing"


def test_ik_is_used_only_where_it_is_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host = BuildMachine(Processor("A CPU", ("avx2",)), (), gpu_wheel=False)
    monkeypatch.setattr(finished, "this_host", lambda: host)
    with pytest.raises(UsageError) as caught:
        with_build(EngineConfig(library="ik"), tmp_path)
    assert caught.value.code == "build_missing"
    made = write_build(tmp_path, name="ik_llama.cpp-1-cpu", kind="ik_llama.cpp", llama_version="ik_llama.cpp")
    made.server.unlink()
    assert chosen(tmp_path) is None
    assert with_build(EngineConfig(), tmp_path).library is None
    used = with_build(EngineConfig(library="ik"), tmp_path)
    assert (used.library, used.header) == (str(made.library), str(made.header))
    assert finished.build_of(used) == replace(made, folder=tmp_path / made.name)
