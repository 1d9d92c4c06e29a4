"""Prefixes of log lines are removed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.engine import EngineKind
from tokenmill.engine.logs import LogLine, lines, read
from tokenmill.engine.logs.lines import line

KINDS: tuple[EngineKind, ...] = ("llama-server", "ik_llama", "vllm")


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        ("0.00.161.837 I load_tensors: x = 1", LogLine("load_tensors: x = 1", "info")),
        ("12.10.003.953 E srv load_model: no", LogLine("srv load_model: no", "error")),
        ("\x1b[34m1.16.674.767\x1b[0m \x1b[32mI \x1b[0mllama: y", LogLine("llama: y", "info")),
        ("[42027] 1.35.716.244 W slot x", LogLine("slot x", "warning")),
        ("Jun 18 08:57:40  llama-Qwen:[1351]: 10.13.175.674 I slot z", LogLine("slot z", "info")),
        ("16:08:55 gleb-epyc bash[152048]: llama_kv_cache_init: a", LogLine("llama_kv_cache_init: a")),
        (
            'INFO [                    main] model loaded | tid="1" timestamp=2',
            LogLine('model loaded | tid="1" timestamp=2', "info", "main"),
        ),
        (" ERR [              load_model] unable to load", LogLine("unable to load", "error", "load_model")),
        (
            "(EngineCore_DP0 pid=559) (Worker_TP1 pid=566) INFO 10-24 09:51:22 [default_loader.py:267] Loading",
            LogLine("Loading", "info", "Worker_TP1"),
        ),
        ("(VllmWorker rank=3 pid=29) WARNING 05-28 13:30:33 [a.py:2] b", LogLine("b", "warning", "VllmWorker rank=3")),
        ("INFO 01-30 03:19:14 kv_cache_utils.py:395] # GPU blocks: 1381", LogLine("# GPU blocks: 1381", "info")),
        ("[2024-09-05T00:38:34Z] ERROR:    [Errno 98] no", LogLine("[Errno 98] no", "error")),
        ("CUDA error: out of memory", LogLine("CUDA error: out of memory")),
    ],
)
def test_a_line_without_its_prefixes(raw: str, wanted: LogLine) -> None:
    assert list(lines(raw)) == [wanted]


def test_every_state_of_a_progress_bar_is_a_line() -> None:
    text = "Loading:   0%\rLoading:  50%\rLoading: 100%\n\n  \nnext"
    assert [said.text for said in lines(text)] == ["Loading:   0%", "Loading:  50%", "Loading: 100%", "next"]


@given(st.text(max_size=200))
def test_any_text_is_read(text: str) -> None:
    assert "\n" not in line(text.replace("\n", " ")).text
    for kind in KINDS:
        assert read(kind, text).timings == ()
