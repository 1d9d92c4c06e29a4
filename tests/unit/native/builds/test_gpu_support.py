"""GPUs that the library in use cannot use."""

from dataclasses import replace

import pytest

from tokenmill.config import EngineConfig
from tokenmill.hardware.machine import Gpu, Machine
from tokenmill.native.builds import gpu_support
from tokenmill.native.builds.finished import BuildMachine
from tokenmill.native.builds.gpu_support import BUILD_COMMAND, unused_gpus
from tokenmill.native.builds.toolchain import Processor
from tokenmill.units import GIB

HOST = BuildMachine(Processor("A CPU", ()), (), gpu_wheel=False)
NVIDIA = Gpu(0, "RTX 3090", "nvidia", 24 * GIB)
AMD = replace(NVIDIA, name="W7900", vendor="amd")


@pytest.fixture(autouse=True)
def cpu_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_support, "this_host", lambda: HOST)


@pytest.mark.parametrize("kind", ["native", "llama-server"])
def test_the_wheel_uses_no_gpu(kind: str) -> None:
    found = unused_gpus(Machine("box", gpus=(NVIDIA,)), EngineConfig(kind=kind))
    assert found is not None
    assert found.gpus == (NVIDIA,)
    assert found.command == BUILD_COMMAND
    assert BUILD_COMMAND in found.remedy


def test_no_build_command_for_other_vendors() -> None:
    found = unused_gpus(Machine("box", gpus=(AMD,)), EngineConfig())
    assert found is not None
    assert found.command is None
    assert "engine.library" in found.remedy


@pytest.mark.parametrize(
    ("gpus", "engine"),
    [
        ((), EngineConfig()),
        ((replace(AMD, vram_bytes=None),), EngineConfig()),  # an integrated GPU
        ((NVIDIA,), EngineConfig(kind="vllm")),
        ((NVIDIA,), EngineConfig(kind="ik_llama")),
        ((NVIDIA,), EngineConfig(library="/opt/libllama.so", header="/opt/llama.h")),
        ((NVIDIA,), EngineConfig(kind="llama-server", binary="/opt/llama-server")),
    ],
)
def test_nothing_to_warn_about(gpus: tuple[Gpu, ...], engine: EngineConfig) -> None:
    assert unused_gpus(Machine("box", gpus=gpus), engine) is None


def test_a_wheel_for_gpus_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_support, "this_host", lambda: replace(HOST, gpu_wheel=True))
    assert unused_gpus(Machine("box", gpus=(NVIDIA,)), EngineConfig()) is None
