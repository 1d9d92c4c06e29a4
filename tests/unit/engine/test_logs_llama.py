"""Parsers of llama.cpp and ik_llama.cpp logs, on captured logs."""

from pathlib import Path

import pytest

from tokenmill.engine import logs
from tokenmill.engine.engine import EngineKind
from tokenmill.engine.fit_params import Buffer
from tokenmill.engine.logs import EngineLog, Hint, RequestedContext
from tokenmill.units import MIB

DATA = Path(__file__).parents[2] / "data" / "logs"


def log(name: str) -> EngineLog:
    kind: EngineKind = "ik_llama" if name.startswith("ik") else "llama-server"
    return logs.read(kind, (DATA / f"{name}.log").read_text(encoding="utf-8"))


def mib(size: float) -> int:
    return round(size * MIB)


BUFFERS = {
    "llama.cpp-smollm2-v3": (),
    "llama.cpp-smollm2-v4": (Buffer("CPU_Mapped", mib(92.10)), Buffer("CPU", 0, mib(45), mib(15.64))),
    "llama.cpp-smollm2-v5": (Buffer("CPU_Mapped", mib(92.10)), Buffer("CPU", 0, mib(45), mib(15.64))),
    "llama.cpp-moe-mmap-v4": (
        Buffer("CPU_Mapped", mib(14.49)),
        Buffer("CPU_REPACK", mib(15.47)),
        Buffer("CPU", 0, mib(4), mib(12.02)),
    ),
    "llama.cpp-mla-no-mmap-v4": (Buffer("CPU", mib(2.94), mib(9), mib(26.01)), Buffer("CPU_REPACK", mib(16.17))),
    "llama.cpp-2025-amx": (
        Buffer("CPU_Mapped", mib(4685.30)),
        Buffer("AMX", mib(4491.48)),
        Buffer("CPU", 0, mib(512), mib(296.01)),
    ),
    # RPC[...] is memory of another machine
    "llama.cpp-2024-server": (
        Buffer("CPU", mib(563.65)),
        Buffer("CUDA0", mib(18764.46), 0, mib(1104)),
        Buffer("CUDA_Host", 0, 0, mib(32.01)),
    ),
    "llama.cpp-2026-colour": (Buffer("CUDA0", 0, mib(1.31) + mib(10) + mib(0.33)),),
    "llama.cpp-fails-kernel": (Buffer("CPU", mib(636.18)), Buffer("CUDA0", mib(23.64))),
    "ik-two-4090": (
        Buffer("CPU", sum(map(mib, (36486.67, 43905.23, 43534.23, 43534.23, 43905.23, 43534.23, 44473.21, 938.98)))),
        Buffer("CUDA0", mib(13995.99), mib(592.89), mib(3588.01)),
        Buffer("CUDA1", mib(13730.03), mib(573.76), mib(3560.02)),
        Buffer("CUDA_Host", 0, 0, mib(312.02)),
    ),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers(name: str) -> None:
    assert log(name).buffers == BUFFERS[name]


def test_a_split_buffer_is_divided_where_the_log_says_how() -> None:
    buffers = {buffer.name: buffer for buffer in log("ik-split-graph").buffers}
    assert set(buffers) == {"CPU", "CUDA0", "CUDA1"}
    assert buffers["CUDA0"].model_bytes == mib(5567.36)
    assert buffers["CUDA1"].model_bytes == mib(5776.60) + mib(607.05)


def test_a_split_buffer_stays_one_where_it_does_not() -> None:
    buffers = log("ik-journal").buffers
    assert buffers == (Buffer("CUDA_Split", 0, mib(14632.83)), Buffer("CUDA0", 0, 0, mib(292)))


@pytest.mark.parametrize(
    ("name", "build", "requested", "output", "mapped"),
    [
        ("llama.cpp-smollm2-v3", None, RequestedContext(), None, None),  # the wheel does not know its build
        ("llama.cpp-smollm2-v4", None, RequestedContext(2048, 2, 512, 2, False), 0.38, True),
        ("llama.cpp-mla-no-mmap-v4", None, RequestedContext(2048, 2, 512, 2, False), 0.02, False),
        ("llama.cpp-2025-amx", None, RequestedContext(4096, 1, 512), 0.49, True),
        ("ik-two-4090", "b3737 (58f08e43)", RequestedContext(32768, None, 2048), 0.99, None),
    ],
)
def test_context_and_build(
    name: str, build: str | None, requested: RequestedContext, output: float | None, mapped: bool | None
) -> None:
    found = log(name)
    assert (found.build, found.requested, found.mapped) == (build, requested, mapped)
    assert found.output_bytes == (None if output is None else mib(output))


@pytest.mark.parametrize(
    ("line", "build"),
    [
        ("main: build = 2275 (a33e6a0d)", "b2275 (a33e6a0d)"),
        ("build: 5389 (e3a9421b) with cc (GCC) 13.3.0 for x86_64-linux-gnu", "b5389 (e3a9421b)"),
        ("version: 5172 (eb1776b1)", "b5172 (eb1776b1)"),
        ("0.00.001.932 I srv          init: build_info: b8659-e43970099", "b8659 (e43970099)"),
        (
            "0.00.002.067 I cmn  common_param: common_params_print_info: build 8659 (e43970099) with GNU",
            "b8659 (e43970099)",
        ),
    ],
)
def test_builds(line: str, build: str) -> None:
    assert logs.read("llama-server", line).build == build


def test_only_the_last_run_counts() -> None:
    text = (DATA / "llama.cpp-smollm2-v4.log").read_text(encoding="utf-8")
    failed = (DATA / "llama.cpp-fails-arch.log").read_text(encoding="utf-8")
    assert logs.read("llama-server", failed + text) == logs.read("llama-server", text)
    again = logs.read("llama-server", text + failed)
    assert (again.buffers, again.cause is not None) == ((), True)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("llama.cpp-smollm2-v3", [(40, 284.70, 8, 123.06, None, 1), (56, 331.84, 8, 127.50, None, 0)]),
        ("llama.cpp-smollm2-reuse", [(40, 22.82, 8, 68.35, 0, 0), (51, 39.78, 8, 2.32, 5, 0)]),
        ("llama.cpp-2024-timing", [(12, 768.49, 783, 245.13, None, 0)]),
        ("llama.cpp-2026-timing", [(27, 34.22, 192, 11.92, None, 0)]),
        ("ik-two-4090", [(4, 10.71, 181, 10.21, 0, 0)]),
        ("ik-seed-timing", [(15061, 27.77, 65, 7.91, None, None)]),
    ],
)
def test_timings(name: str, wanted: list[tuple[int, float, int, float, int | None, int | None]]) -> None:
    found = [
        (t.prompt_tokens, t.prompt_tok_s, t.generated_tokens, t.decode_tok_s, t.cached_tokens, t.slot)
        for t in log(name).timings
    ]
    assert found == wanted


def test_a_prompt_of_several_batches_says_what_it_reused_once() -> None:
    text = """\
slot update_slots: id  3 | task 7 | kv cache rm [128, end)
slot update_slots: id  3 | task 7 | kv cache rm [2176, end)
prompt eval time =     100.00 ms /  3000 tokens (    0.03 ms per token, 30000.00 tokens per second)
       eval time =      10.00 ms /     2 tokens (    5.00 ms per token,   200.00 tokens per second)
"""
    assert [timing.cached_tokens for timing in logs.read("llama-server", text).timings] == [128]


def test_the_filled_prompt_cache() -> None:
    assert log("llama.cpp-smollm2-v4").prompt_cache_bytes == mib(1.034)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("srv    load_model: loading model '/m.gguf'", Hint("reading", None, "weights")),
        ("load_tensors: loading model tensors, this can take a while...", Hint("reading", None, "weights")),
        ("load_tensors:      CUDA0 model buffer size = 48928.09 MiB", Hint("reading", None, "47.8 GiB into CUDA0")),
        ("." * 42, Hint("reading", 0.42, "weights")),
        ("llama_context: constructing llama_context", Hint("context", None, "KV cache and compute buffers")),
        (
            "common_init_: warming up the model with an empty run - please wait ...",
            Hint("warming", None, "warm-up run"),
        ),
        ("main: server is listening on http://127.0.0.1:8080 - starting the main loop", Hint("ready")),
        ("0.00.226.901 I srv          init: listening on http://127.0.0.1:45563", Hint("ready")),
        ('INFO [ main] HTTP server listening | tid="1" port="10002"', Hint("ready")),
        # llama.cpp of 2024 listened before it loaded
        ("main: HTTP server is listening, hostname: 127.0.0.1, port: 8080, http threads: 7", None),
        ("slot      release: id  1 | task 0 | stop processing", None),
    ],
)
def test_progress(text: str, wanted: Hint | None) -> None:
    assert logs.read("llama-server", text).hint == wanted


@pytest.mark.parametrize(
    "name", ["llama.cpp-smollm2-v3", "llama.cpp-smollm2-v4", "ik-two-4090", "llama.cpp-2024-server"]
)
def test_whole_logs_end_ready_without_faults(name: str) -> None:
    found = log(name)
    assert (found.hint, found.faults) == (Hint("ready"), ())
