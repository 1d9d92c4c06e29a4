"""Errors in engine logs: the cause and not its consequences, with the values that matter."""

from pathlib import Path

import pytest

from tokenmill.engine import logs
from tokenmill.engine.engine import EngineKind
from tokenmill.engine.logs import EngineLog, FaultKind
from tokenmill.units import GIB, MIB

DATA = Path(__file__).parents[2] / "data" / "logs"


def log(name: str) -> EngineLog:
    kind: EngineKind = "vllm" if name.startswith("vllm") else "ik_llama" if name.startswith("ik") else "llama-server"
    return logs.read(kind, (DATA / f"{name}.log").read_text(encoding="utf-8"))


CAUSES: dict[str, tuple[FaultKind, str, str]] = {
    "llama.cpp-fails-missing": ("missing", "/models/nothere.gguf", "mounts"),
    "llama.cpp-fails-bad": ("damaged", "GGUF", "unfinished download"),
    "llama.cpp-fails-cut": ("damaged", "blk.0.ffn_gate_exps.weight", "checksum"),
    "llama.cpp-fails-arch": ("architecture", "architecture qwen9moe", "newer build"),
    "llama.cpp-fails-oom": ("memory", "57.2 GiB", "--context"),
    "llama.cpp-fails-port": ("port", "port 42775", "ss -ltnp"),
    "llama.cpp-fails-vram": ("vram", "GPU 0 has no 141.4 GiB", "--margin"),
    "llama.cpp-fails-later": ("vram", "during computation", "--ubatch"),
    "llama.cpp-fails-kernel": ("cuda", "this GPU", "CMAKE_CUDA_ARCHITECTURES"),
    "ik-fails-compute": ("vram", "GPU 0 has no 1103.9 GiB", "GGML_SCHED_MAX_COPIES=1"),
    "vllm-fails-context": (
        "context",
        "24.0 GiB of KV cache, but 3.18 GiB are available; 34736 tokens would fit",
        "--context",
    ),
    "vllm-fails-free": ("vram", "31.44 GiB of GPU memory are free, but vLLM needs 45.01 GiB", "nvidia-smi"),
    "vllm-fails-vram": ("vram", "GPU 0 has no 50.00 MiB", "--gpu-memory-utilization"),
    "vllm-fails-port": ("port", "port 44319", "ss -ltnp"),
    "vllm-fails-architecture": ("architecture", "LlamaForCausalLM", "newer version"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause(name: str) -> None:
    kind, message, hint = CAUSES[name]
    found = log(name)
    assert found.cause is not None
    assert (found.cause.kind, found.faults) == (kind, (found.cause,))
    assert message in found.cause.message
    assert hint in (found.cause.hint or "")
    text = (DATA / f"{name}.log").read_text(encoding="utf-8")
    assert found.cause.line in text


def test_every_failing_log_is_in_the_table() -> None:
    assert {path.stem for path in DATA.glob("*fails*.log")} == set(CAUSES)


def test_which_card_and_how_much() -> None:
    cause = log("llama.cpp-fails-vram").cause
    assert cause is not None
    assert (cause.device, round((cause.needed_bytes or 0) / MIB)) == (0, 144817)
    free = log("vllm-fails-free").cause
    assert free is not None
    assert free.needed_bytes == round(45.01 * GIB)


def test_a_lock_that_fails_is_told_but_ends_nothing() -> None:
    found = log("llama.cpp-moe-mlock-v3")
    assert found.cause is None
    (fault,) = found.faults
    assert (fault.kind, fault.fatal) == ("mlock", False)
    assert "only 0 B " in fault.message
    assert "LimitMEMLOCK=infinity" in (fault.hint or "")


LINES: list[tuple[EngineKind, str, FaultKind, str]] = [
    ("llama-server", "error: invalid argument: --moe-cache-mib", "argument", "--moe-cache-mib"),
    ("ik_llama", "error: unknown argument: -sm", "argument", " -sm"),
    ("vllm", "vllm serve: error: unrecognized arguments: --fit on", "argument", "--fit on"),
    (
        "llama-server",
        "llama_model_load: error loading model: mmap failed: Cannot allocate memory",
        "mmap",
        "Cannot allocate memory",
    ),
    ("llama-server", "ggml.c:123: GGML_ASSERT(ggml_can_mul_mat(a, b)) failed", "assertion", "ggml_can_mul_mat(a, b)"),
    ("llama-server", "CUDA error: an illegal memory access was encountered", "cuda", "an illegal memory access"),
    ("llama-server", "failed to open GGUF file '/m.gguf' (Permission denied)", "missing", "permission to read /m.gguf"),
    ("ik_llama", "Illegal instruction (core dumped)", "crash", "illegal instruction"),
    ("llama-server", "srv    load_model: failed to load model, '/m.gguf'", "load", "load"),
    ("vllm", "OSError: [Errno 98] Address already in use", "port", "port"),
    (
        "vllm",
        "(Worker pid=3) ValueError: No available memory for the cache blocks. Try increasing",
        "vram",
        "KV cache",
    ),
    (
        "vllm",
        "ValueError: The model's max seq len (4096) is larger than the maximum number of tokens that can be stored in KV cache (3664). Try",
        "context",
        "3664 tokens",
    ),
    (
        "vllm",
        "OSError: /models/x is not a local folder and is not a valid model identifier listed on",
        "missing",
        "/models/x",
    ),
    ("vllm", "RuntimeError: Engine core initialization failed. See root cause above.", "load", "load"),
]


@pytest.mark.parametrize(("kind", "text", "fault", "words"), LINES)
def test_single_lines(kind: EngineKind, text: str, fault: FaultKind, words: str) -> None:
    cause = logs.read(kind, text).cause
    assert cause is not None
    assert cause.kind == fault
    assert words in cause.message
    assert cause.hint


def test_a_pinned_buffer_that_fails_is_no_cause() -> None:
    text = "ggml_cuda_host_malloc: failed to allocate 1900.00 MiB of pinned memory: invalid argument"
    found = logs.read("llama-server", text)
    assert (found.cause, found.faults[0].kind) == (None, "memory")
