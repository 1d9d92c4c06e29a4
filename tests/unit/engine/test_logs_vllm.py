"""Parser of vLLM's logs, on captured logs."""

from pathlib import Path

import pytest

from tokenmill.engine import logs
from tokenmill.engine.fit_params import Buffer
from tokenmill.engine.logs import EngineLog, Hint
from tokenmill.units import GIB

DATA = Path(__file__).parents[2] / "data" / "logs"


def log(name: str) -> EngineLog:
    return logs.read("vllm", (DATA / f"{name}.log").read_text(encoding="utf-8"))


def gib(size: float) -> int:
    return round(size * GIB)


def test_on_the_processor() -> None:
    found = log("vllm-cpu")
    assert (found.build, found.kv_tokens, found.requested.tokens) == ("0.32.0", 65536, 4096)
    assert found.buffers == (Buffer("CPU", 0, gib(0.06)),)
    assert (found.hint, found.faults) == (Hint("ready"), ())


def test_on_a_gpu() -> None:
    found = log("vllm-cuda")
    assert found.buffers == (Buffer("CUDA0", gib(2.0513), gib(33.31)),)
    assert (found.kv_tokens, found.requested.tokens) == (1_587_648, 2048)
    assert found.hint == Hint("warming", 1.0, "CUDA graphs")


def test_the_first_engine() -> None:
    found = log("vllm-2025-v0")
    assert found.buffers == (Buffer("CUDA0", gib(3.34 + 0.0014), gib(2.20), gib(1.39)),)
    assert found.kv_tokens == 82360


def test_each_worker_is_a_gpu() -> None:
    text = "\n".join(
        f"(Worker_TP{rank} pid=1) INFO 05-06 20:59:59 [g.py:1] Model loading took 12.{rank} GiB memory and 3 seconds"
        for rank in range(3)
    )
    assert [buffer.name for buffer in logs.read("vllm", text).buffers] == ["CUDA0", "CUDA1", "CUDA2"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "Loading safetensors checkpoint shards:  40% Completed | 2/5 [00:01<00:01]",
            Hint("reading", 0.4, "weights"),
        ),
        ("Loading fastsafetensors checkpoint shards:  20% Completed | 1/5", Hint("reading", 0.2, "weights")),
        (
            "(Worker pid=1) INFO 11-15 06:37:14 [c.py:68] Starting to load model /m...",
            Hint("reading", None, "weights"),
        ),
        (
            "INFO 11-15 06:37:14 [c.py:68] Loading weights took 0.08 seconds",
            Hint("context", None, "memory profiling"),
        ),
        (
            "INFO 11-24 11:44:15 [b.py:286] Compiling a graph for dynamic shape takes 13.62 s",
            Hint("compiling", None, "kernels"),
        ),
        ("INFO:     Application startup complete.", Hint("ready")),
        (
            "INFO 09-03 16:28:10 [a.py:1882] vLLM API server version 0.10.2.dev378",
            Hint("starting", None, "worker processes"),
        ),
    ],
)
def test_progress(text: str, wanted: Hint) -> None:
    assert logs.read("vllm", text).hint == wanted


def test_shards_rise() -> None:
    text = (DATA / "vllm-shards.log").read_text(encoding="utf-8").splitlines()
    shares = [logs.read("vllm", line).hint for line in text[:5]]
    assert [hint.share for hint in shares if hint] == [0.56, 0.67, 0.78, 0.89, 1.0]


def test_the_version_of_a_release_candidate() -> None:
    assert (
        logs.read("vllm", "INFO 09-03 16:28:10 [a.py:1] vLLM API server version 0.10.2.dev378+g4d7f").build
        == "0.10.2.dev378+g4d7f"
    )
