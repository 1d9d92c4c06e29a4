"""The wheel's llama-server as a program: its flags have the same effect as llama-server's; others are refused."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support.embedded_params import differences
from support.servers import small_plan
from tokenmill.engine.server.embedded import parameters
from tokenmill.engine.server.launch import llama_extras
from tokenmill.errors import UsageError
from tokenmill.launch import spell
from tokenmill.launch.flag_sets import stored


def embedded(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tokenmill.engine.server.embedded", *words],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_embedded_server_alone(tmp_path: Path) -> None:
    assert embedded("--version").stdout == "version: llama.cpp b11549 (xllamacpp 2026.10.11549)\n"
    broken = tmp_path / "model.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 64)
    failed = embedded("--model", str(broken), "--fit", "off")
    assert failed.returncode == 1
    assert "Failed to init server" in failed.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model"], "--model needs a value"),
        (["--model", "x", "--host", "0.0.0.0"], "--host 0.0.0.0"),
        (["--model", "x", "--mirostat", "1"], "--mirostat"),
        (["--model", "x", "--threads", "many"], "--threads many"),
        (["--model", "x", "--cache-type-k", "q6_0"], "--cache-type-k q6_0"),
        (["--model", "x", "--device", "CUDA0"], "--device CUDA0"),
        (["--port", "1"], "--model is missing"),
    ],
)
def test_flags_that_the_embedded_server_refuses(words: list[str], said: str) -> None:
    import xllamacpp

    with pytest.raises(UsageError, match=said):
        parameters(words, xllamacpp)


def test_flags_are_read_as_llama_cpp_reads_them(tmp_path: Path, smollm2_path: Path) -> None:
    plan = small_plan(smollm2_path)
    odd = replace(
        plan.settings,
        cache_type_k="q8_0",
        cache_type_v="q8_0",
        mlock=True,
        repack=False,
        moe_cache_bytes=5 << 20,
        cache_ram_bytes=7 << 20,
    )
    more = [
        *llama_extras(stored("llama.cpp"), tmp_path),
        "--tensor-split",
        "1,2",
        "--override-tensor",
        "blk=CPU",
        "--numa",
        "numactl",
        "--fit-target",
        "5,6",
    ]
    for settings in (plan.settings, odd):
        argv = list(spell(replace(plan, settings=settings), model="/m/x.gguf").argv)
        assert differences([*argv, *more]) == {}
