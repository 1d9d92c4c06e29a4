"""A llama.cpp source of four files, and programs that stand in for cmake and ninja.

The real build takes minutes (`make test-build`); here the source is only copied and changed, and the programs write
files that have the names of the library and the server.
"""

import hashlib
import tarfile
from pathlib import Path

import pytest

from tokenmill.native.builds import source, toolchain

HEADER = b"// llama.h\n"
LIMIT = f'#include "llama.h"\n\n{source.LIMIT_LINE}\nstruct llama_cparams {{}};\n'
CHANGED = {name: "".join(f"before\n{old}after\n" for old, _ in pairs) for name, pairs in source.CHANGES.items()}

CMAKE = """#!/bin/sh
[ "$1" = --version ] && echo "cmake version ${CMAKE_VERSION:-3.25.1}" && exit
echo "$@" >> "$CALLS"
while [ "$1" != -B ]; do shift; done
mkdir -p "$2"
"""
NINJA = """#!/bin/sh
[ "$1" = --version ] && echo 1.11.1 && exit
echo "$@" >> "$CALLS"
echo "[1/2] Building first.o"
[ -z "$NINJA_FAILS" ] || { echo "error: no such thing"; exit 3; }
[ -z "$NINJA_WAITS" ] || { touch "$NINJA_WAITS"; exec sleep 60; }
mkdir -p "$2/bin"
echo library > "$2/bin/libllama.so.0"
ln -sf libllama.so.0 "$2/bin/libllama.so"
echo server > "$2/bin/llama-server"
echo "[2/2] Linking"
"""


def write_tree(folder: Path) -> Path:
    """The folder of a source distribution."""
    root = folder / "xllamacpp-1" / "thirdparty" / "llama.cpp"
    files = {
        "CMakeLists.txt": b"project(llama.cpp)\n",
        "include/llama.h": HEADER,
        **{name: text.encode() for name, text in CHANGED.items()},
        "src/llama-cparams.h": LIMIT.encode(),
        "src/llama-\xff.txt": b"\xff\xfe",
        "tests/test.cpp": b"",
    }
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def write_archive(folder: Path) -> Path:
    """A source distribution."""
    write_tree(folder / "unpacked")
    path = folder / "xllamacpp-1.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder / "unpacked" / "xllamacpp-1", arcname="xllamacpp-1")
    return path


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Accept the small source, put stand-ins for cmake and ninja first on PATH, and return the file of their calls."""
    monkeypatch.setattr(source, "HEADER_SHA256", hashlib.sha256(HEADER).hexdigest())
    programs = folder / "programs"
    programs.mkdir()
    for name, text in (("cmake", CMAKE), ("ninja", NINJA)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("CALLS", str(folder / "calls"))
    monkeypatch.setattr(toolchain, "architectures_here", tuple)
    (folder / "calls").touch()
    return folder / "calls"
