"""Whatever bytes come, an error of ours or a header comes out, quickly.

What fuzzing found is kept in tests/data/model/corpus and runs again every time.
"""

import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from support.gguf_bytes import FORMATS, TINY_KEYS, TINY_TABLE, array, entry, header, tensors, value
from tokenmill.errors import ModelError, UsageError
from tokenmill.model.describe import describe
from tokenmill.model.gguf import read_headers

CORPUS = Path(__file__).parents[2] / "data" / "model" / "corpus"
GOOD = header(TINY_KEYS | {"a.b": array(8, ["x"] * 3), "split.count": 1}, tensors(TINY_TABLE)[0]) + b"\0" * 99_999

numbers = st.one_of(st.integers(0, 300), st.integers(0, (1 << 64) - 1), st.sampled_from([1 << 31, 1 << 32, 1 << 62]))
names = st.one_of(
    st.sampled_from(["token_embd.weight", "blk.0.ffn_up_exps.weight", "blk.99999.x", "t"]), st.text(max_size=9)
)
kinds = st.one_of(st.integers(0, 45), st.integers(130, 160), st.integers(0, (1 << 32) - 1))
entries = st.builds(entry, names, st.lists(numbers, max_size=5), kinds, numbers.map(lambda n: n // 32 * 32))
u32 = st.integers(0, (1 << 32) - 1)
keys = st.dictionaries(
    st.one_of(
        st.sampled_from(
            [
                "general.architecture",
                "general.alignment",
                "llama.block_count",
                "llama.attention.head_count",
                "split.count",
                "llama.expert_count",
                "llama.expert_used_count",
                "llama.embedding_length",
                "general.file_type",
                "split.no",
                "tokenizer.ggml.tokens",
                "llama.attention.head_count_kv",
                "llama.nextn_predict_layers",
                "llama.attention.sliding_window",
                "llama.attention.sliding_window_pattern",
            ]
        ),
        st.text(max_size=8),
    ),
    st.one_of(
        st.just("llama"),
        st.just("llama4"),
        st.text(max_size=8),
        st.booleans(),
        u32,
        st.lists(u32, max_size=9).map(lambda items: array(4, items)),
        st.sampled_from(sorted(FORMATS)).flatmap(lambda kind: st.just(value(1, kind))),
    ),
    max_size=14,
)


def check(raw: bytes, folder: Path) -> None:
    path = folder / "m.gguf"
    path.write_bytes(raw)
    start = time.perf_counter()
    try:
        profile = describe(read_headers(path))
        assert profile.bytes <= len(raw)
        assert profile.active_parameters <= profile.parameters
        assert profile.read_bytes(64) <= profile.bytes + 1e-6 * profile.bytes
    except (ModelError, UsageError) as error:
        assert "m.gguf" in error.message
    assert time.perf_counter() - start < 1


relaxed = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@relaxed
@given(raw=st.binary(max_size=400))
@example(raw=b"GGUF\x03\0\0\0")
def test_random_bytes(raw: bytes, tmp_path: Path) -> None:
    check(raw, tmp_path)
    check(b"GGUF\x03\0\0\0" + raw, tmp_path)


@relaxed
@given(changes=st.lists(st.tuples(st.integers(0, len(GOOD) - 99_990), st.integers(0, 255)), min_size=1, max_size=6))
def test_flipped_bytes(changes: list[tuple[int, int]], tmp_path: Path) -> None:
    raw = bytearray(GOOD)
    for position, byte in changes:
        raw[position] = byte
    check(bytes(raw), tmp_path)


@relaxed
@given(found=keys, table=st.lists(entries, max_size=6), pad=st.integers(0, 5000))
def test_well_formed_nonsense(found: dict[str, object], table: list[bytes], pad: int, tmp_path: Path) -> None:
    check(header(found, table) + b"\0" * pad, tmp_path)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.gguf.bin")), ids=lambda path: path.name)
def test_earlier_findings(path: Path, tmp_path: Path) -> None:
    check(path.read_bytes(), tmp_path)


def test_the_corpus_exists() -> None:
    assert len(list(CORPUS.glob("*.gguf.bin"))) >= 3
