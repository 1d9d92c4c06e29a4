"""A `Host` whose files are given as text."""

import fnmatch
from dataclasses import dataclass, field

from tokenmill.hardware.gpu import nvml
from tokenmill.hardware.host import CommandResult, natural


@dataclass
class WrittenHost:
    """Files by absolute path; everything else is not there."""

    files: dict[str, str] = field(default_factory=dict)

    def text(self, path: str) -> str | None:
        return self.files.get(path)

    def data(self, path: str) -> bytes | None:
        found = self.files.get(path)
        return None if found is None else found.encode()

    def exists(self, path: str) -> bool:
        return any(name == path or name.startswith(f"{path}/") for name in self.files)

    def glob(self, pattern: str) -> list[str]:
        depth = pattern.count("/")
        known = {"/".join(name.split("/")[: depth + 1]) for name in self.files}
        return sorted((name for name in known if fnmatch.fnmatch(name, pattern)), key=natural)

    def link(self, path: str) -> str | None:
        return None

    def real(self, path: str) -> str:
        return path

    def space(self, path: str) -> tuple[int, int] | None:
        return None

    def run(self, *command: str) -> CommandResult | None:
        return None

    def nvml(self) -> nvml.NvmlReading:
        return nvml.NvmlReading(library=False)
