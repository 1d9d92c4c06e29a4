"""Flags from an engine's --help: names, number of values, version, and replacements of missing flags."""

import pytest

from tokenmill.errors import FlagUnknown, UsageError
from tokenmill.launch.flag_sets import REPLACEMENTS, STORED, FlagSet, family, stored
from tokenmill.planner.goal import DialectName

MAINLINE = """
----- common params -----

-h,    --help, --usage                  print usage and exit
-t,    --threads N                      number of CPU threads to use during generation (default: -1)
                                        (env: LLAMA_ARG_THREADS)
-lm,   --load-mode MODE                 model loading mode (default: auto)
                                        - auto: mmap, unless a device does not support it
-kvo,  --kv-offload, -nkvo, --no-kv-offload
                                        whether to enable KV cache offloading (default: enabled)
-ot,   --override-tensor <tensor name pattern>=<buffer type>,...
                                        override tensor buffer type
--control-vector-layer-range START END
                                        layer range to apply the control vector(s) to, start and end inclusive
"""
FORK = """
general:

  -h,    --help, --usage          print usage and exit
         --mlock                  force system to keep model in RAM
  -fa, --flash-attn (auto|on|off|0|1)
                                  set Flash Attention (default: on)
  -mla,  --mla-use                enable MLA (default: 3)
  -mqkv,  --merge-qkv,            merge Q,K,V (default: 0)
  -cram-n-min --cache-ram-n-min N minimum number of the cached tokens that triggers prompt cache
         --embedding(s)           restrict to only support embedding use case
"""
ARGPARSE = """
usage: vllm serve [model_tag] [options]

  --tensor-parallel-size TENSOR_PARALLEL_SIZE, -tp TENSOR_PARALLEL_SIZE
                        Number of tensor parallel groups.
  --max-model-len MAX_MODEL_LEN
                        Model context length.
  --enable-prefix-caching, --no-enable-prefix-caching
                        Whether to enable prefix caching.
"""


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (
            MAINLINE,
            {
                "-h": 0,
                "--help": 0,
                "--usage": 0,
                "-t": 1,
                "--threads": 1,
                "-lm": 1,
                "--load-mode": 1,
                "-kvo": 0,
                "--kv-offload": 0,
                "-nkvo": 0,
                "--no-kv-offload": 0,
                "-ot": 1,
                "--override-tensor": 1,
                "--control-vector-layer-range": 2,
            },
        ),
        (
            FORK,
            {
                "-h": 0,
                "--help": 0,
                "--usage": 0,
                "--mlock": 0,
                "-fa": 1,
                "--flash-attn": 1,
                "-mla": 0,
                "--mla-use": 0,
                "-mqkv": 0,
                "--merge-qkv": 0,
                "-cram-n-min": 1,
                "--cache-ram-n-min": 1,
                "--embedding": 0,
                "--embeddings": 0,
            },
        ),
        (
            ARGPARSE,
            {
                "--tensor-parallel-size": 1,
                "-tp": 1,
                "--max-model-len": 1,
                "--enable-prefix-caching": 0,
                "--no-enable-prefix-caching": 0,
            },
        ),
    ],
)
def test_help_is_read(text: str, values: dict[str, int]) -> None:
    assert dict(FlagSet.from_help(text).values) == values


def test_text_without_flags_is_refused() -> None:
    with pytest.raises(UsageError, match="no flags"):
        FlagSet.from_help("command not found\n")


@pytest.mark.parametrize("engine", list(STORED))
def test_stored_lists_know_their_dialect_and_source(engine: DialectName) -> None:
    flags = stored(engine)
    assert family(flags.dialect) == family(engine)
    assert flags.dialect == engine or engine.startswith("ik_llama-2026")
    assert flags.version != "this engine"
    assert flags.has("--host", "--port")


@pytest.mark.parametrize(
    ("engine", "flag", "hint"),
    [
        ("llama.cpp", "--no-mmap", "--load-mode none"),
        ("llama.cpp", "--mlock", "--load-mode mlock"),
        ("llama.cpp-2025", "--load-mode", "--no-mmap"),
        ("llama.cpp", "--fit-margin", "--fit-target"),
        ("ik_llama", "--fit-target", "--fit-margin"),
        ("ik_llama", "--kv-unified", "its own share"),
        ("ik_llama", "-fmoe", "on unless"),
        ("ik_llama", "--no-repack", "only with --run-time-repack"),
        ("ik_llama", "--no-op-offload", "--offload-policy"),
        ("vllm", "--override-tensor", "--cpu-offload-gb"),
        ("llama.cpp", "--ctx-szie", "did you mean --ctx-size?"),
    ],
)
def test_a_missing_flag_is_an_error_that_says_what_to_write(engine: DialectName, flag: str, hint: str) -> None:
    with pytest.raises(FlagUnknown, match=f"has no flag {flag}") as caught:
        stored(engine).require(flag)
    assert hint in (caught.value.hint or "")
    assert stored(engine).version in caught.value.message


def test_what_the_fork_had_when() -> None:
    assert not stored("ik_llama-2025").has("--fit")
    assert stored("ik_llama-2026-03").has("--fit", "--fit-margin", "-fmoe")
    assert not stored("ik_llama-2026-04").has("--gpu-fit-margin")
    assert stored("ik_llama").has("--gpu-fit-margin")
    assert not stored("ik_llama").has("-fmoe")


def test_replacements_name_flags_that_exist_somewhere() -> None:
    everywhere = {name for engine in STORED for name in stored(engine).values}
    assert {needed for rows in REPLACEMENTS.values() for needed, _ in rows} <= everywhere


def test_underscores_are_dashes_as_in_the_engines() -> None:
    assert stored("llama.cpp").has("--ctx_size")
