"""Replays captured machines: `captured("epyc-dual")` is a `Host` over tests/data/hardware/epyc-dual."""

import glob
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmill.hardware.gpu.nvml import NvmlCard, NvmlLink, NvmlReading
from tokenmill.hardware.host import CommandResult, Host, natural

DATA = Path(__file__).parents[2] / "data" / "hardware"
SECTION = re.compile(r"^-- (?:(link|hex|run|failed|space) )?(.+) --\n", re.MULTILINE)


class CapturedHost:
    """A `Host` over a folder with an unpacked capture; commands that are not captured are not installed."""

    def __init__(self, root: Path, nvml: NvmlReading) -> None:
        self.root = root
        self.commands: dict[str, CommandResult] = {}
        self.spaces: dict[str, tuple[int, int]] = {}
        self.reading = nvml
        self.asked: list[str] = []

    def unpack(self, capture: str) -> None:
        """Add the contents of a capture file to this host."""
        parts = SECTION.split(capture)[1:]
        for kind, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            place = self._at(name)
            if kind in ("run", "failed"):
                self.commands[name] = CommandResult(0, body) if kind == "run" else CommandResult(1, "", body)
            elif kind == "space":
                self.spaces[name] = (int(body.split()[0]), int(body.split()[1]))
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                if kind == "link":
                    place.symlink_to(body.strip())
                else:
                    place.write_bytes(bytes.fromhex(body) if kind == "hex" else body.encode())

    def _at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        data = self.data(path)
        return None if data is None else data.decode()

    def data(self, path: str) -> bytes | None:
        try:
            return self._at(path).read_bytes()
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        return os.path.lexists(self._at(path)) or path in self.spaces

    def glob(self, pattern: str) -> list[str]:
        found = glob.glob(str(self._at(pattern)))  # noqa: PTH207
        return sorted((path.removeprefix(str(self.root)) for path in found), key=natural)

    def link(self, path: str) -> str | None:
        place = self._at(path)
        return str(place.readlink()) if place.is_symlink() else None

    def real(self, path: str) -> str:
        return path

    def space(self, path: str) -> tuple[int, int] | None:
        return self.spaces.get(path)

    def run(self, *command: str) -> CommandResult | None:
        self.asked.append(" ".join(command))
        return self.commands.get(" ".join(command))

    def nvml(self) -> NvmlReading:
        return self.reading


def load_nvml(path: Path) -> NvmlReading:
    """Load a recorded NVML reading; without a file, a machine without driver."""
    if not path.exists():
        return NvmlReading(library=False)
    document = json.loads(path.read_text())
    cards = (
        NvmlCard(**{**card, "links": tuple(NvmlLink(**link) for link in card["links"])}) for card in document["cards"]
    )
    return NvmlReading(tuple(cards), document["error"], document["library"])


@pytest.fixture
def captured(tmp_path: Path) -> Callable[[str], Host]:
    """Unpack one captured machine."""

    def unpack(name: str) -> CapturedHost:
        host = CapturedHost(tmp_path / name, load_nvml(DATA / name / "nvml.json"))
        host.unpack((DATA / name / "capture.txt").read_text())
        return host

    return unpack


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Host]:
    """Make a host from capture text."""

    def make(capture: str = "", nvml: NvmlReading | None = None) -> CapturedHost:
        host = CapturedHost(tmp_path, nvml or NvmlReading(library=False))
        host.unpack(capture)
        return host

    return make
