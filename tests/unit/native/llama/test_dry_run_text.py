"""Parsing of the memory that engines print, and the error of a dead child process."""

from pathlib import Path

import pytest

from tokenmill.engine.fit_params import (
    Buffer,
    last_lines,
    parse_cache,
    parse_fit_print,
    parse_log,
    parse_output,
    parse_table,
    run_dry,
    run_fit_params,
)
from tokenmill.errors import EngineError
from tokenmill.native.llama.dry_run import _answer, assemble
from tokenmill.units import MIB

# As llama-fit-params of b11549 prints it; figures of an H200, experts of a Kimi slice on the CPU, 32768 tokens.
FIT_PRINT = """\
0.00.123.456 I llama_fit_params: printing estimated memory in MiB to stdout (device, model, context, compute) ...
CUDA0 2324 180 3256 
Host 37478 0 88 
"""  # noqa: W291 - it prints a blank after each figure

# The example in tools/fit-params/README.md of llama.cpp.
TABLE = """\
llama_memory_breakdown_print: | memory breakdown [MiB] | total   free     self   model   context   compute    unaccounted |
llama_memory_breakdown_print: |   - CUDA0 (RTX 4090)   | 24077 =  945 + (19187 = 17904 +     384 +     898) +        3945 |
llama_memory_breakdown_print: |   - Host               |                 58271 = 58259 +       0 +      12                |
"""

# Shape of ik_llama.cpp's log, figures from github.com/ikawrakow/ik_llama.cpp/pull/1886 and related issues.
IK_LOG = """\
llm_load_tensors: offloaded 62/62 layers to GPU
llm_load_tensors:        CPU buffer size =  1640.62 MiB
llm_load_tensors:      CUDA0 buffer size = 18932.27 MiB
llm_load_tensors:     CUDA10 buffer size = 18774.62 MiB
llama_kv_cache_init:      CUDA0 KV buffer size =   180.00 MiB
llama_kv_cache_init:     CUDA10 KV buffer size =    90.00 MiB
llama_init_from_model: KV self size  =  270.00 MiB, c^KV (f16):  270.00 MiB, kv^T: not used
llama_init_from_model:  CUDA_Host  output buffer size =     0.62 MiB
llama_init_from_model:      CUDA0 compute buffer size =   587.00 MiB
llama_init_from_model:     CUDA10 compute buffer size =   735.00 MiB
llama_init_from_model:  CUDA_Host compute buffer size =   176.01 MiB
llama_init_from_model: graph splits = 1453
"""

# The wheel's llama.cpp, dry, on a ghost of gpt-oss-120b: buffers of model and cache say 0, the caches tell their size.
DRY_LOG = """\
load_tensors:          CPU model buffer size =     0.00 MiB
llama_context:        CPU  output buffer size =     0.77 MiB
llama_kv_cache_iswa: creating non-SWA KV cache, size = 8192 cells
llama_kv_cache:        CPU KV buffer size =     0.00 MiB
llama_kv_cache: size =  288.00 MiB (  8192 cells,  18 layers,  1/1 seqs), K (f16):  144.00 MiB, V (f16):  144.00 MiB
llama_kv_cache_iswa: creating     SWA KV cache, size = 768 cells
llama_kv_cache:        CPU KV buffer size =     0.00 MiB
llama_kv_cache: size =   27.00 MiB (   768 cells,  18 layers,  1/1 seqs), K (f16):   13.50 MiB, V (f16):   13.50 MiB
sched_reserve:        CPU compute buffer size =   429.65 MiB
"""


def test_fit_print() -> None:
    assert parse_fit_print(FIT_PRINT) == (
        Buffer("CUDA0", 2324 * MIB, 180 * MIB, 3256 * MIB),
        Buffer("Host", 37478 * MIB, 0, 88 * MIB),
    )


def test_table() -> None:
    assert parse_table(TABLE) == (
        Buffer("CUDA0", 17904 * MIB, 384 * MIB, 898 * MIB),
        Buffer("Host", 58259 * MIB, 0, 12 * MIB),
    )


def test_log_of_a_dry_run_that_allocates() -> None:
    buffers = {buffer.name: buffer for buffer in parse_log(IK_LOG)}
    assert list(buffers) == ["CPU", "CUDA0", "CUDA10", "CUDA_Host"]
    assert buffers["CUDA0"] == Buffer("CUDA0", round(18932.27 * MIB), 180 * MIB, 587 * MIB)
    assert buffers["CUDA_Host"] == Buffer("CUDA_Host", 0, 0, round(176.01 * MIB))
    assert parse_output(IK_LOG) == round(0.62 * MIB)
    assert [buffers[name].gpu for name in buffers] == [None, 0, 10, None]


def test_exact_sizes_win_where_they_agree_with_the_log() -> None:
    compute = round(429.65 * MIB) + 3000
    exact = (Buffer("CPU", 5, 7, compute), Buffer("CPU_REPACK", 11))
    found = assemble(exact, DRY_LOG, weights=16)
    assert (found.source, found.buffers, found.output_bytes) == ("breakdown", exact, round(0.77 * MIB))


@pytest.mark.parametrize("exact", [None, (Buffer("CPU", 5, 7, 430 * MIB),)])
def test_the_log_is_believed_where_the_map_is_not_what_it_should_be(exact: tuple[Buffer, ...] | None) -> None:
    found = assemble(exact, DRY_LOG, weights=16)
    assert found.source == "log"
    assert found.buffers == (Buffer("Host", 16, 315 * MIB, round(429.65 * MIB)),)
    assert parse_cache(DRY_LOG) == 315 * MIB


@pytest.mark.parametrize(
    ("code", "stdout", "message"),
    [
        (-6, "", r"SIGABRT.*kimi\.gguf"),
        (-11, '{"library": 1', "SIGSEGV"),
        (1, "", r"kimi\.gguf \(exit 1\)"),
        (0, '{"error": "it would not", "hint": "ggml.c:123: GGML_ASSERT(x) failed"}', "it would not"),
    ],
)
def test_a_dead_child_is_a_sentence(code: int, stdout: str, message: str) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        _answer(Path("/models/kimi.gguf"), code, stdout, "loading\n\nggml.c:123: GGML_ASSERT(x) failed\n")
    assert "GGML_ASSERT(x) failed" in (caught.value.hint or "")


def test_last_lines() -> None:
    assert last_lines("a\n\n b \nc\nd\ne\n") == "b | c | d | e"
    assert last_lines("\n") is None


def test_binaries_are_asked(tmp_path: Path) -> None:
    good, silent, broken = tmp_path / "fit", tmp_path / "silent", tmp_path / "broken"
    good.write_text(f"#!/bin/sh\n[ \"$5 $6\" = '--fit-print on' ] && cat <<'END'\n{FIT_PRINT}END\n")
    silent.write_text("#!/bin/sh\necho nothing to see\n")
    broken.write_text("#!/bin/sh\necho out of luck >&2; exit 3\n")
    for script in (good, silent, broken):
        script.chmod(0o755)
    assert run_fit_params(str(good), ["-m", "x.gguf", "-c", "4096"]) == parse_fit_print(FIT_PRINT)
    with pytest.raises(EngineError, match=str(silent)) as caught:
        run_dry(str(silent), ["-m", "x.gguf"])
    assert caught.value.hint == "nothing to see"
    with pytest.raises(EngineError, match=r"\(3\)") as caught:
        run_dry(str(broken), [])
    assert caught.value.hint == "out of luck"
    with pytest.raises(EngineError, match="No such file"):
        run_dry(str(tmp_path / "absent"), [])
