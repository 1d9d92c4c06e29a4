"""The version of an engine, from its flags, its image and the flags of a command."""

import pytest

from tokenmill.launch import FlagSet, possible_versions, read_command
from tokenmill.launch.flag_sets import stored

FIT = "llama-server -m x -ngl 999 --fit --fit-margin 3072 --k-cache-hadamard"


@pytest.mark.parametrize(
    ("command", "versions"),
    [
        ("llama-server -m x -c 8192", ["llama.cpp", "llama.cpp-2025"]),
        ("llama-server -m x --no-mmap", ["llama.cpp-2025"]),
        ("llama-server -m x --load-mode none", ["llama.cpp"]),
        (FIT, ["ik_llama", "ik_llama-2026-04", "ik_llama-2026-03"]),
        (f"{FIT} --gpu-fit-margin 7,12550", ["ik_llama"]),
        ("~/ik_llama.cpp/build/bin/llama-server -m x -mla 3", ["ik_llama", "ik_llama-2026-04", "ik_llama-2026-03"]),
        ("vllm serve x", ["vllm"]),
        ("podman run ghcr.io/ggml-org/llama.cpp:server-b8156 -m x", ["llama.cpp-2025"]),
        ("podman run ghcr.io/ggml-org/llama.cpp:server-b11549 -m x", ["llama.cpp"]),
        ("podman run ghcr.io/ggml-org/llama.cpp:server-b9000 -m x", ["llama.cpp", "llama.cpp-2025"]),
        ("podman run ghcr.io/ggml-org/llama.cpp:server -m x", ["llama.cpp", "llama.cpp-2025"]),
    ],
)
def test_versions_that_a_command_may_be_meant_for(command: str, versions: list[str]) -> None:
    found = possible_versions(read_command(command))
    assert [name for name in found if name != "ik_llama-2025"] == versions


def without(flags: FlagSet, *names: str) -> FlagSet:
    lines = (f"{name} {'N' * count}" for name, count in flags.values.items() if name not in names)
    return FlagSet.from_help("\n".join(lines))


def test_an_installed_program_decides() -> None:
    command = read_command(FIT)
    newest = stored("ik_llama")
    assert possible_versions(command, newest) == ("ik_llama",)
    spring = without(newest, "-gfm", "--gpu-fit-margin")
    assert possible_versions(command, spring) == ("ik_llama-2026-04", "ik_llama-2026-03")
    older = without(newest, "-gfm", "--gpu-fit-margin", "--fit", "--fit-margin")
    assert possible_versions(command, older) == ("ik_llama-2025",)
    plain = read_command("llama-server -m x -c 8192")
    assert possible_versions(plain, stored("llama.cpp-2025")) == ("llama.cpp-2025",)
    assert possible_versions(plain, stored("llama.cpp")) == ("llama.cpp",)
