"""Command lines checked by real programs: llama.cpp's argument parser, a shell, and engines' --help."""

import os
import re
import shlex
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from support import llama_args
from support.dialect_plans import machine_with, placed, plan_of, small_profile
from tokenmill.errors import UsageError
from tokenmill.launch import FlagSet, flags_of, spell
from tokenmill.launch.files import write_as
from tokenmill.launch.flag_sets import captured, stored
from tokenmill.planner.goal import Goal
from tokenmill.planner.plan import Plan
from tokenmill.units import GIB


def hybrid(goal: Goal | None = None) -> Plan:
    profile = small_profile(30)
    placement = placed(profile, [f"gpu{layer // 10}" for layer in range(30)], "gpu2", {1, 12, 21})
    return plan_of(
        profile,
        placement,
        machine_with(3, nodes=2),
        goal=goal or Goal(reserve_cores=2),
        host_gib=400,
        sequences=3,
        mlock=True,
    )


def test_the_captured_list_is_the_wheels_own_help() -> None:
    assert dict(FlagSet.from_help(llama_args.server_help()).values) == dict(captured("llama.cpp-b11549").values)


def test_llama_cpp_takes_every_word() -> None:
    plan = hybrid()
    argv = list(spell(plan, model="/m/x.gguf", port=9001).argv)
    parsed = llama_args.parse(
        [re.sub(r"=CUDA\d", "=CPU", word) for word in argv]
    )  # a build without GPUs knows CPU alone
    assert parsed.accepted, parsed.said
    assert "DEPRECATED" not in parsed.said
    assert parsed.values == {
        "n_ctx": 3 * 8192,
        "n_parallel": 3,
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_gpu_layers": 999,
        "port": 9001,
        "hostnames": ["127.0.0.1"],
        "model": "/m/x.gguf",
        "tensor_split": [10.0, 10.0, 11.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    }


@pytest.mark.parametrize(
    ("goal", "changes"),
    [
        (Goal(own_fit=True, fit_margin_bytes=(GIB, 2 * GIB)), {}),
        (Goal(cpu_only=True), {"repack": True}),
        (Goal(), {"mmap": False, "moe_cache_bytes": GIB, "cache_type_k": "q8_0", "flash_attention": False}),
        (Goal(), {"cache_ram_bytes": 32 * GIB, "sequences": 64}),
    ],
)
def test_llama_cpp_takes_other_plans_too(goal: Goal, changes: dict[str, object]) -> None:
    plan = hybrid(goal)
    plan = replace(plan, settings=replace(plan.settings, **changes))  # type: ignore[arg-type]
    if goal.cpu_only:
        plan = replace(plan, placement=placed(plan.profile, ["dram"] * 30, "dram"))
    parsed = llama_args.parse([re.sub(r"=CUDA\d", "=CPU", word) for word in spell(plan, model="m").argv])
    assert parsed.accepted, parsed.said


def test_llama_cpp_refuses_what_the_captured_list_lacks() -> None:
    for flag in ("--no-mmap", "--mlock", "--fit-margin", "-mla"):
        assert not stored("llama.cpp").has(flag)
        assert not llama_args.parse(["llama-server", flag, "3"]).accepted


def program(folder: Path, name: str, body: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


PRINT_WORDS = "printf '%s\\n' \"$@\""
SKIP_OPTIONS = 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"'


def run(script: str, folder: Path, *arguments: str) -> list[str]:
    path = folder / "run.sh"
    path.write_text(script)
    subprocess.run(["sh", "-n", str(path)], check=True)
    done = subprocess.run(
        ["sh", str(path), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={"PATH": f"{folder}:{os.environ['PATH']}"},
    )
    return done.stdout.splitlines()


def test_a_shell_hands_over_exactly_the_words(tmp_path: Path) -> None:
    program(tmp_path, "llama-server", f"{PRINT_WORDS}; echo $CUDA_DEVICE_ORDER")
    program(tmp_path, "numactl", SKIP_OPTIONS)
    program(tmp_path, "curl", "echo healthy")
    plan = hybrid()
    command = spell(plan, model="/srv/it's a model/x.gguf")
    script = write_as("shell", command, plan)
    assert run(script, tmp_path) == [*command.argv[1:], "PCI_BUS_ID"]
    assert run(script, tmp_path, "health") == ["healthy"]


def test_a_shell_hands_podman_the_image_and_its_words(tmp_path: Path) -> None:
    program(tmp_path, "podman", PRINT_WORDS)
    program(tmp_path, "numactl", SKIP_OPTIONS)
    plan = hybrid()
    command = spell(plan, model="/srv/it's a model/x.gguf")
    words = run(write_as("podman", command, plan, image="img:1"), tmp_path)
    assert words[0] == "run"
    assert "/srv/it's a model:/models:ro,Z" in words
    inside = words[words.index("img:1") + 1 :]
    assert inside[:2] == ["--model", "/models/x.gguf"]
    assert inside[2:4] + inside[6:] == list(command.argv[3:5]) + list(command.argv[7:])


def test_an_engine_is_asked_for_its_flags_and_version(tmp_path: Path) -> None:
    (tmp_path / "help").write_text("  -mla,  --mla-use                enable MLA\n         --fit       place\n")
    body = (
        f"case $1 in --version) echo 'version: 4524 (0123abc)' >&2 ;; *) cat {shlex.quote(str(tmp_path))}/help ;; esac"
    )
    binary = program(tmp_path, "llama-server", body)
    flags = flags_of(binary)
    assert flags.version == f"{binary} 4524 (0123abc)"
    assert flags.dialect == "ik_llama"
    assert flags.has("-ot"), "its parser takes -ot although its help is silent"
    assert not flags.has("--jinja"), "what neither its help nor the silent list has is not there"


def test_vllm_is_asked_for_all_of_its_help(tmp_path: Path) -> None:
    body = '[ "$1 $2" = "serve --help=all" ] && echo "  --max-model-len LEN" || echo 0.32.0'
    assert flags_of(program(tmp_path, "vllm", body)).dialect == "vllm"


@pytest.mark.parametrize("body", ["echo nothing here", "exit 3"])
def test_a_program_that_is_no_engine(tmp_path: Path, body: str) -> None:
    with pytest.raises(UsageError):
        flags_of(program(tmp_path, "llama-server", body))


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    binary = str(tmp_path / "llama-server")
    with pytest.raises(UsageError, match=binary):
        flags_of(binary)
