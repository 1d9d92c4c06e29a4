"""Finished builds: which one an engine uses, and what removes them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from support.finished_builds import write_build
from tokenmill.config import EngineConfig
from tokenmill.errors import UsageError
from tokenmill.hardware.machine import Gpu, Machine
from tokenmill.native.builds import finished
from tokenmill.native.builds.finished import BuildMachine, chosen, max_sequences, remove, with_build
from tokenmill.native.builds.gpu_support import unused_gpus
from tokenmill.native.builds.toolchain import Processor
from tokenmill.native.llama.library import WHEEL_MAX_SEQUENCES
from tokenmill.units import GIB
from tokenmill.version import WHEEL_VERSION

HERE = BuildMachine(Processor("A CPU", ("avx2", "avx512f")), (), gpu_wheel=False)


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished, "this_host", lambda: HERE)


def test_a_build_is_read_back(tmp_path: Path) -> None:
    made = write_build(tmp_path)
    assert finished.finished(tmp_path) == (made,)
    assert "folder" not in json.loads((made.folder / "build.json").read_text())


def test_unfinished_and_damaged_builds_are_left_out(tmp_path: Path) -> None:
    write_build(tmp_path, name=".building-x")
    write_build(tmp_path, name="without-library").library.unlink()
    (write_build(tmp_path, name="cut").folder / "build.json").write_text("{")
    (write_build(tmp_path, name="list").folder / "build.json").write_text("[]")
    assert finished.finished(tmp_path) == ()
    assert finished.finished(tmp_path / "missing") == ()


def test_the_newest_suitable_build_is_used(tmp_path: Path) -> None:
    write_build(tmp_path, max_sequences=512)
    newer = write_build(tmp_path, max_sequences=1024, built_at="2026-11-19T12:00:00+00:00")
    write_build(tmp_path, cuda_architectures=("90",), built_at="2026-11-20T12:00:00+00:00")
    assert chosen(tmp_path) == newer
    assert chosen(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("changes", "host", "suits"),
    [
        ({}, HERE, True),
        ({"xllamacpp": "2025.1.1"}, HERE, False),
        ({"llama_version": "0.5.0"}, HERE, False),
        ({"cpu": "Another CPU"}, HERE, False),
        ({"cpu_isa": ("avx2", "amx_int8")}, HERE, False),
        ({"cuda_architectures": ("90",)}, HERE, False),
        ({}, replace(HERE, gpu_wheel=True), False),
        ({}, replace(HERE, cuda_architectures=("90",)), False),
        ({"cuda_architectures": ("90",)}, replace(HERE, cuda_architectures=("90",)), True),
        ({"cuda_architectures": ("90",)}, replace(HERE, cuda_architectures=("90",), gpu_wheel=True), True),
        ({"cuda_architectures": ("86", "90")}, replace(HERE, cuda_architectures=("90",)), True),
        ({"cuda_architectures": ("86",)}, replace(HERE, cuda_architectures=("90",)), False),
        ({"cuda_architectures": ("90",)}, replace(HERE, cuda_architectures=("86", "90")), False),
    ],
)
def test_a_build_suits_the_machine_that_it_was_made_for(
    changes: dict[str, object], host: BuildMachine, suits: bool, tmp_path: Path
) -> None:
    assert (finished.unsuitable(write_build(tmp_path, **changes), host) is None) is suits


def test_a_build_without_cuda_uses_no_gpu(tmp_path: Path) -> None:
    cuda = write_build(tmp_path, cuda_architectures=("86",))
    cpu = write_build(tmp_path)
    machine = Machine("box", gpus=(Gpu(0, "RTX 3090", "nvidia", 24 * GIB),))
    assert unused_gpus(machine, EngineConfig(library=str(cuda.library))) is None
    found = unused_gpus(machine, EngineConfig(library=str(cpu.library)))
    assert found is not None
    assert found.library == cpu.name


def test_an_engine_uses_the_build(tmp_path: Path) -> None:
    made = write_build(tmp_path)
    native = with_build(EngineConfig(), tmp_path)
    assert (native.library, native.header) == (str(made.library), str(made.header))
    assert with_build(EngineConfig(kind="llama-server"), tmp_path).binary == str(made.server)
    assert max_sequences(native) == 4096
    assert finished.build_of(native) == made


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(library="/opt/libllama.so", header="/opt/llama.h"),
        EngineConfig(kind="llama-server", binary="/opt/llama-server"),
        EngineConfig(kind="llama-server", container="localhost/llama.cpp"),
        EngineConfig(kind="ik_llama"),
        EngineConfig(kind="vllm"),
        EngineConfig(kind="http://127.0.0.1:8080"),
    ],
)
def test_other_engines_are_left_alone(config: EngineConfig, tmp_path: Path) -> None:
    write_build(tmp_path)
    assert with_build(config, tmp_path) == config
    assert finished.library_decisions(config, tmp_path) == ()


@pytest.mark.parametrize("kind", ["native", "llama-server"])
def test_the_wheel_can_be_asked_for(kind: str, tmp_path: Path) -> None:
    write_build(tmp_path)
    config = with_build(EngineConfig(kind=kind, library="wheel"), tmp_path)
    assert config == EngineConfig(kind=kind)
    assert max_sequences(config) == WHEEL_MAX_SEQUENCES


def test_a_plan_says_which_library_is_used(tmp_path: Path) -> None:
    assert finished.library_decisions(with_build(EngineConfig(), tmp_path), tmp_path) == ()
    old = write_build(tmp_path, xllamacpp="2025.1.1", name="old")
    (decision,) = finished.library_decisions(with_build(EngineConfig(), tmp_path), tmp_path)
    assert WHEEL_VERSION in decision.value
    assert old.name in decision.reason
    made = write_build(tmp_path)
    (decision,) = finished.library_decisions(with_build(EngineConfig(), tmp_path), tmp_path)
    assert decision.value == made.name
    assert "4096" in decision.reason


def test_a_build_is_removed(tmp_path: Path) -> None:
    made = write_build(tmp_path)
    with pytest.raises(UsageError) as caught:
        remove(tmp_path, "another")
    assert made.name in (caught.value.hint or "")
    remove(tmp_path, made.name)
    assert list(tmp_path.iterdir()) == []
