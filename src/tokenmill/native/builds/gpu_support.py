"""GPUs of a machine that the llama.cpp library in use cannot use.

`unused_gpus` is the only place that decides it: plans, engines and `tokenmill doctor` show its result.
"""

from dataclasses import dataclass

from tokenmill.config import EngineConfig
from tokenmill.hardware.machine import Gpu, Machine
from tokenmill.native.builds.finished import build_of, this_host
from tokenmill.units import number_of
from tokenmill.version import WHEEL, WHEEL_VERSION

BUILD_COMMAND = "tokenmill engines build --cuda"
_OTHER_VENDORS = "set engine.library and engine.header to a llama.cpp built for this GPU (ROCm, SYCL or Vulkan)"


@dataclass(frozen=True, slots=True)
class UnusedGpus:
    """GPUs that the library in use cannot use."""

    gpus: tuple[Gpu, ...]
    library: str

    @property
    def command(self) -> str | None:
        """The command that makes a library for them; None unless one is an NVIDIA GPU."""
        return BUILD_COMMAND if any(gpu.vendor == "nvidia" for gpu in self.gpus) else None

    @property
    def seen(self) -> str:
        """What is wrong, in one sentence."""
        count = number_of(len(self.gpus), "GPU")
        return f"{self.library} is built without GPU support and cannot use the {count} here ({self.gpus[0].name})"

    @property
    def remedy(self) -> str:
        """What to do."""
        if self.command is None:
            return _OTHER_VENDORS
        return f"build llama.cpp for it, once: {self.command} (later commands use that build)"


def unused_gpus(machine: Machine, engine: EngineConfig) -> UnusedGpus | None:
    """The GPUs of this machine that the engine's library cannot use; None if there are none or it is unknown.

    `engine` is the configuration after `with_build`. A library, program or container that the user configured is not
    opened, so what it can use is unknown; the native engine refuses to start if it lacks a device of its plan.
    """
    cards = tuple(gpu for gpu in machine.gpus if gpu.vram_bytes)  # integrated GPUs have no memory of their own
    if engine.kind not in ("native", "llama-server") or not cards:
        return None
    if build := build_of(engine):
        uses_one = build.uses_cuda and any(gpu.vendor == "nvidia" for gpu in cards)
        return None if uses_one else UnusedGpus(cards, build.name)
    if engine.library or engine.binary or engine.container or this_host().gpu_wheel:
        return None
    return UnusedGpus(cards, f"{WHEEL} {WHEEL_VERSION}")
