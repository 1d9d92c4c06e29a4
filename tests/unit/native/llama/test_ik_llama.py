"""ik_llama.cpp's functions under llama.cpp's names, against a stand-in for its library, which CI cannot fetch.

`make test-ik IK=FOLDER` runs the native engine's tests on the real one.
"""

from pathlib import Path
from typing import Any

import pytest
from cffi import FFI

from tokenmill.config import EngineConfig
from tokenmill.errors import EngineError
from tokenmill.native.builds.finished import uses_ik
from tokenmill.native.llama import cdefs, ik_llama
from tokenmill.native.llama.ik_llama import IkFunctions

HEADER = """
// as in ik_llama.cpp, with fewer fields
struct llama_model_tensor_buft_override { const char * pattern; ggml_backend_buffer_type_t buft; };
typedef struct llama_batch {
    int32_t n_tokens;
    llama_token * token; float * embd; llama_pos * pos; int32_t * n_seq_id; llama_seq_id ** seq_id; int8_t * logits;
    llama_pos all_pos_0; // used without pos
} llama_batch;
struct llama_model_params {
    const char* devices; int32_t n_gpu_layers; enum llama_split_mode split_mode; enum ggml_type type_k;
    llama_progress_callback progress_callback; void * progress_callback_user_data;
    const struct llama_model_kv_override * kv_overrides;
    bool use_mmap; /* the rest is left out */
};
struct llama_context_params {
    uint32_t n_ctx; enum ggml_type type_k; int mla_attn; ggml_abort_callback abort_callback;
    void * abort_callback_data;
};
bool llama_kv_cache_seq_rm(struct llama_context * ctx);
"""


def batch_of(ffi: Any, rows: list[tuple[int, int]]) -> tuple[Any, list[Any]]:
    """A batch with these (sequence, position) rows, and what it points to."""
    owners = [ffi.new("int32_t[]", [sequence]) for sequence, _ in rows]
    kept = [
        ffi.new("int32_t[]", [position for _, position in rows]),
        ffi.new("int32_t[]", [1] * len(rows)),
        ffi.new("int32_t *[]", owners),
        *owners,
    ]
    batch = ffi.new("llama_batch *", {"n_tokens": len(rows), "pos": kept[0], "n_seq_id": kept[1], "seq_id": kept[2]})
    return batch[0], kept


class StandIn:
    """A library with `room` free runs of cells after as many defragmentations."""

    def __init__(self, *, full_for: int = 0, last: int = 0, first: int = -1) -> None:
        self.full_for = full_for
        self.last = last
        self.first = first
        self.calls: list[tuple[Any, ...]] = []

    def llama_decode(self, context: Any, batch: Any) -> int:
        self.calls.append(("decode",))
        return 1 if self.full_for else 0

    def llama_kv_cache_defrag(self, context: Any) -> None:
        self.calls.append(("defrag",))

    def llama_kv_cache_update(self, context: Any) -> int:
        self.full_for -= 1
        return 0

    def llama_kv_cache_seq_rm(self, context: Any, sequence: int, start: int, end: int) -> bool:
        self.calls.append(("remove", sequence, start, end))
        return True

    def llama_kv_cache_seq_pos_max(self, context: Any, sequence: int) -> int:
        return self.last

    def llama_kv_cache_seq_pos_min(self, context: Any, sequence: int) -> int:
        return self.first


@pytest.fixture(scope="module")
def ffi() -> FFI:
    made = FFI()
    made.cdef(ik_llama.declarations(HEADER) + cdefs.SAMPLERS)
    return made


def test_structures_are_read_from_the_header(ffi: Any) -> None:
    model = ffi.new("struct llama_model_params *")
    model.use_mmap = True
    model.n_gpu_layers = -1
    model.type_k = 1
    assert [name for name, _ in ffi.typeof("struct llama_context_params").fields] == [
        "n_ctx",
        "type_k",
        "mla_attn",
        "abort_callback",
        "abort_callback_data",
    ]
    assert (model.use_mmap, model.n_gpu_layers, model.progress_callback) == (True, -1, ffi.NULL)


def test_a_header_without_the_structures_is_refused() -> None:
    with pytest.raises(EngineError, match="llama_model_params"):
        ik_llama.declarations("struct llama_model_tensor_buft_override { int x; };")


def test_the_header_says_which_library_it_is(tmp_path: Path) -> None:
    for text, expected in ((HEADER, True), ("struct llama_model_params { int x; };", False)):
        (tmp_path / "llama.h").write_text(text)
        config = EngineConfig(library="libllama.so", header=str(tmp_path / "llama.h"))
        assert uses_ik(config) is expected
    assert not uses_ik(EngineConfig())


@pytest.mark.parametrize(("last", "first", "expected"), [(0, -1, -1), (0, 0, 0), (7, 0, 7)])
def test_an_empty_sequence_has_no_last_position(ffi: Any, last: int, first: int, expected: int) -> None:
    functions = IkFunctions(ffi, StandIn(last=last, first=first), None)
    assert functions.llama_memory_seq_pos_max(None, 0) == expected


def test_cells_are_moved_together_before_there_is_no_room(ffi: Any) -> None:
    library = StandIn(full_for=2)
    batch, _kept = batch_of(ffi, [(3, 11), (3, 12), (5, 4)])
    assert IkFunctions(ffi, library, None).llama_decode(None, batch) == 0
    removed = [("remove", 3, 11, -1), ("remove", 5, 4, -1)]  # cells of micro-batches that had found room
    once = [("decode",), *removed, ("defrag",)]
    assert library.calls == [*once, *once, ("decode",)]


def test_nothing_of_a_batch_without_room_stays(ffi: Any) -> None:
    library = StandIn(full_for=10_000)
    batch, _kept = batch_of(ffi, [(3, 11)])
    assert IkFunctions(ffi, library, None).llama_decode(None, batch) == 1
    assert library.calls[-1] == ("remove", 3, 11, -1)


def test_samplers_are_those_of_llama_cpp(ffi: Any) -> None:
    class Samplers:
        llama_sampler_init_greedy = "of llama.cpp"

    assert IkFunctions(ffi, StandIn(), Samplers).llama_sampler_init_greedy == "of llama.cpp"
    with pytest.raises(AttributeError):
        _ = IkFunctions(ffi, StandIn(), Samplers).llama_max_parallel_sequences
