"""Finished builds of llama.cpp without their contents."""

from pathlib import Path
from typing import Any

from tokenmill.native.builds.finished import Build
from tokenmill.native.builds.recipe import LlamaCppRecipe
from tokenmill.native.llama.library import LLAMA_VERSION
from tokenmill.version import WHEEL_VERSION


def write_build(engines: Path, **changes: object) -> Build:
    """A finished build in a folder."""
    values: dict[str, Any] = {
        "xllamacpp": WHEEL_VERSION,
        "llama_version": LLAMA_VERSION,
        "max_sequences": 4096,
        "cuda_architectures": (),
        "cpu": "A CPU",
        "cpu_isa": ("avx2",),
        "source_sha256": "0" * 64,
        "changes_sha256": "2" * 64,
        "library_sha256": "1" * 64,
        "options": ("GGML_NATIVE=ON",),
        "compiler": "c++ 12",
        "nvcc": None,
        "cmake": "3.25",
        "verified": True,
        "built_at": "2026-11-18T12:00:00+00:00",
        "duration_s": 60.0,
        "bytes": 1000,
        **changes,
    }
    values.setdefault("name", LlamaCppRecipe(Path, values["max_sequences"]).name(values["cuda_architectures"]))
    made = Build(**values, folder=engines / values["name"])
    (made.folder / "bin").mkdir(parents=True)
    for path in (made.library, made.header, made.server):
        path.touch()
    made.write()
    return made
