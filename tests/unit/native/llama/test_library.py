"""llama.cpp's C interface: the declarations match the pinned wheel, and other libraries are refused."""

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from cffi import FFI

from tokenmill.errors import EngineError
from tokenmill.native.llama import cdefs
from tokenmill.native.llama import library as llama_library
from tokenmill.native.llama.settings import GGML_TYPES
from tokenmill.version import INSTALL_HINT, WHEEL, WHEEL_VERSION

PROJECT = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())

# As llama.h writes them: comments, enumerations, callbacks and pointers to structures of its own.
HEADER = """
    struct llama_model_params {
        // NULL-terminated list of devices to use for offloading (if NULL, all available devices are used)
        ggml_backend_dev_t * devices;
        const struct llama_model_tensor_buft_override * tensor_buft_overrides;
        int32_t n_gpu_layers; // number of layers to store in VRAM
        enum llama_split_mode split_mode; // how to split the model
        enum llama_load_mode  load_mode;
        enum llama_lazy_mode lazy_mode;
        int32_t main_gpu;
        const float * tensor_split;
        llama_progress_callback progress_callback;
        void * progress_callback_user_data;
        const struct llama_model_kv_override * kv_overrides;
        bool vocab_only;
        bool check_tensors;
        bool use_extra_bufts; /* spread
                                 over lines */
        bool no_host;
        bool no_alloc;
        bool load_mtp;
    };
    struct llama_context_params {
        uint32_t n_ctx;
        uint32_t n_batch;
        uint32_t n_ubatch;
        uint32_t n_seq_max;
        uint32_t n_rs_seq;
        uint32_t n_outputs_max;
        uint32_t n_outputs_max_per_seq;
        int32_t  n_threads;
        int32_t  n_threads_batch;
        enum llama_context_type      ctx_type;
        enum llama_rope_scaling_type rope_scaling_type;
        enum llama_pooling_type      pooling_type;
        enum llama_attention_type    attention_type;
        enum llama_flash_attn_type   flash_attn_type;
        float    rope_freq_base;
        float    rope_freq_scale;
        float    yarn_ext_factor;
        float    yarn_attn_factor;
        float    yarn_beta_fast;
        float    yarn_beta_slow;
        uint32_t yarn_orig_ctx;
        float    defrag_thold;
        ggml_backend_sched_eval_callback cb_eval;
        void * cb_eval_user_data;
        enum ggml_type type_k;
        enum ggml_type type_v;
        size_t moe_cache_size;
        ggml_abort_callback abort_callback;
        void *              abort_callback_data;
        bool embeddings;
        bool offload_kqv;
        bool no_perf;
        bool op_offload;
        bool swa_full;
        bool kv_unified;
        struct llama_sampler_seq_config * samplers;
        size_t                            n_samplers;
        struct llama_context * ctx_other;
    };
"""


@pytest.fixture(scope="module")
def library() -> llama_library.Library:
    return llama_library.open_library(more=cdefs.BREAKDOWN)


def test_the_wheels_library_passes_every_check(library: llama_library.Library) -> None:
    assert library.path == llama_library.wheel_library()
    assert library.version == llama_library.LLAMA_VERSION
    assert library.max_sequences == 256
    assert not hasattr(library.lib, "llama_max_parallel_sequences")  # or it should be asked
    assert "CPU" in library.devices()
    assert "AVX2 = 1" in library.text(library.lib.llama_print_system_info())


def test_the_pin_is_the_projects() -> None:
    pinned = f"{WHEEL}=={WHEEL_VERSION}"
    assert [line for line in PROJECT["project"]["dependencies"] if line.startswith(WHEEL)] == [pinned]
    assert metadata.version(WHEEL) == WHEEL_VERSION


def test_parameters_survive_the_way_there_and_back(library: llama_library.Library) -> None:
    for kind in ("model", "context"):
        params = getattr(library.lib, f"llama_{kind}_default_params")()
        plain = {name for name, field in library.ffi.typeof(params).fields if field.type.kind == "primitive"}
        assert plain == set(getattr(cdefs, f"{kind.upper()}_DEFAULTS"))  # every plain field is checked at opening


def test_every_cache_type_has_ggmls_number(library: llama_library.Library) -> None:
    ffi = FFI()
    ffi.cdef("const char * ggml_type_name(int type);")
    lib = ffi.dlopen(str(library.path))
    assert {ffi.string(lib.ggml_type_name(number)).decode(): number for number in GGML_TYPES.values()} == GGML_TYPES


def test_structures_are_taken_from_a_header(tmp_path: Path, library: llama_library.Library) -> None:
    ours, theirs = FFI(), FFI()
    ours.cdef(llama_library.declare(cdefs.STRUCTS))
    theirs.cdef(llama_library.declare(llama_library.structs_in(HEADER)))
    for name in cdefs.STRUCTS:
        layouts = [
            [(field, place.offset) for field, place in ffi.typeof(f"struct {name}").fields] for ffi in (ours, theirs)
        ]
        assert layouts[0] == layouts[1]
    (tmp_path / "llama.h").write_text(HEADER)
    assert llama_library.open_library(library.path, header=tmp_path / "llama.h").version == library.version


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("uint32_t n_batch;", "uint64_t new_here; uint32_t n_batch;", "n_batch is 0, not 2048"),
        ("bool embeddings;", "bool first; bool embeddings;", "embeddings is True"),
        ("size_t moe_cache_size;", "float scale[2]; size_t moe_cache_size;", "lays out its context parameters"),
        ("bool no_alloc;", "", "no_alloc"),
        ("bool no_host;", "own_type no_host;", r"llama\.h"),
        ("bool no_host;", "int (*call)(int); bool no_host;", "the header declares .* cannot be parsed"),
        ("struct llama_context_params {", "struct llama_other {", "llama_context_params"),
    ],
)
def test_a_header_of_another_build_is_refused(
    before: str, after: str, message: str, tmp_path: Path, library: llama_library.Library
) -> None:
    (tmp_path / "llama.h").write_text(HEADER.replace(before, after))
    with pytest.raises(EngineError, match=message) as caught:
        llama_library.open_library(library.path, header=tmp_path / "llama.h")
    assert caught.value.hint


def test_a_missing_header(tmp_path: Path, library: llama_library.Library) -> None:
    with pytest.raises(EngineError, match=str(tmp_path / "llama.h")):
        llama_library.open_library(library.path, header=tmp_path / "llama.h")


def test_another_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="llama_version") as caught:
        llama_library.open_library(Path("libc.so.6"))
    assert caught.value.hint == llama_library.OWN_HINT
    assert "xllamacpp==2026.10.11549" in llama_library.OWN_HINT
    (tmp_path / "libllama.so").write_text("not a library")
    with pytest.raises(EngineError, match=r"libllama\.so[^:]*: \w[^:]*$"):
        llama_library.open_library(tmp_path / "libllama.so")


def test_a_header_alone_is_not_taken_for_the_wheels(tmp_path: Path) -> None:
    (tmp_path / "llama.h").write_text(HEADER)
    with pytest.raises(EngineError, match="without the library"):
        llama_library.open_library(header=tmp_path / "llama.h")


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_library, "LLAMA_VERSION", "0.7.0")
    with pytest.raises(EngineError, match=r"0\.6\.0-dev.* 0\.7\.0") as caught:
        llama_library.open_library()
    assert "llama.h" in (caught.value.hint or "")


@pytest.mark.parametrize(("installed", "accepted"), [("2026.10.11549+cu128", True), ("2026.11.12001", False)])
def test_only_the_pinned_wheel_is_taken(installed: str, accepted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _name: installed)
    if accepted:
        assert llama_library.wheel_library().suffix == ".so"
    else:
        with pytest.raises(EngineError, match=f"{installed} .* 2026.10.11549"):
            llama_library.wheel_library()


def test_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_library, "find_spec", lambda _name: None)
    with pytest.raises(EngineError, match="xllamacpp") as caught:
        llama_library.wheel_library()
    assert caught.value.hint == INSTALL_HINT


def test_differences_as_text() -> None:
    assert llama_library.differences({"a": 1, "b": 2.0, "c": True}, {"a": 1, "b": -1.0, "c": False, "d": 4}) == [
        "b is 2.0, not -1.0",
        "c is True, not False",
    ]
