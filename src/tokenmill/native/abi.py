"""llama.cpp's C interface, bound with cffi to the shared object inside the pinned xllamacpp wheel.

The declarations are written from include/llama.h of that very build and checked when the library is opened: its
version, that every function is there, and that both parameter structures come back with the defaults they must have.
A libllama.so of one's own is opened with its llama.h, from which the structures are then taken.
Knows layouts, not models; opening maps a hundred megabytes and runs no computation.
"""

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenmill.errors import EngineError

WHEEL = "xllamacpp"
WHEEL_VERSION = "2026.10.11549"
LLAMA_VERSION = "0.6.0-dev"  # what that wheel's llama_version() says; it moves slower than the layouts do
INSTALL_HINT = f"pip install '{WHEEL}=={WHEEL_VERSION}'"
OWN_HINT = f"engine.library and engine.header must be of one build; without both it is the wheel's: {INSTALL_HINT}"

LOAD_MODE_NONE = 0  # read the file into buffers, do not map it
LOG_DEBUG = 1
LOG_CONTINUED = 5
GGML_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
"""Cache types by ggml's numbers."""

STRUCTS = {
    "llama_model_params": """
        ggml_backend_dev_t * devices;
        const struct llama_model_tensor_buft_override * tensor_buft_overrides;
        int32_t n_gpu_layers; int split_mode; int load_mode; int lazy_mode; int32_t main_gpu;
        const float * tensor_split;
        void * progress_callback; void * progress_callback_user_data;
        const void * kv_overrides;
        bool vocab_only; bool check_tensors; bool use_extra_bufts; bool no_host; bool no_alloc; bool load_mtp;
    """,
    "llama_context_params": """
        uint32_t n_ctx; uint32_t n_batch; uint32_t n_ubatch; uint32_t n_seq_max; uint32_t n_rs_seq;
        uint32_t n_outputs_max; uint32_t n_outputs_max_per_seq;
        int32_t n_threads; int32_t n_threads_batch;
        int ctx_type; int rope_scaling_type; int pooling_type; int attention_type; int flash_attn_type;
        float rope_freq_base; float rope_freq_scale; float yarn_ext_factor; float yarn_attn_factor;
        float yarn_beta_fast; float yarn_beta_slow; uint32_t yarn_orig_ctx; float defrag_thold;
        void * cb_eval; void * cb_eval_user_data;
        int type_k; int type_v;
        size_t moe_cache_size;
        void * abort_callback; void * abort_callback_data;
        bool embeddings; bool offload_kqv; bool no_perf; bool op_offload; bool swa_full; bool kv_unified;
        void * samplers; size_t n_samplers;
        void * ctx_other;
    """,
}

TYPES = """
typedef struct ggml_backend_device * ggml_backend_dev_t;
typedef struct ggml_backend_buffer_type * ggml_backend_buffer_type_t;
typedef struct llama_model llama_model;
typedef struct llama_context llama_context;
struct llama_model_tensor_buft_override { const char * pattern; ggml_backend_buffer_type_t buft; };
"""

FUNCTIONS = """
const char * llama_version(void);
const char * llama_print_system_info(void);
void llama_log_set(void (*callback)(int level, const char * text, void * data), void * data);
void llama_backend_init(void);
struct llama_model_params llama_model_default_params(void);
struct llama_context_params llama_context_default_params(void);
llama_model * llama_model_load_from_file(const char * path, struct llama_model_params params);
llama_context * llama_init_from_model(llama_model * model, struct llama_context_params params);
void llama_free(llama_context * context);
void llama_model_free(llama_model * model);
uint64_t llama_model_size(const llama_model * model);
uint64_t llama_model_n_params(const llama_model * model);
int32_t llama_model_desc(const llama_model * model, char * buffer, size_t size);
uint32_t llama_n_ctx(const llama_context * context);
size_t llama_max_devices(void);
size_t ggml_backend_dev_count(void);
ggml_backend_dev_t ggml_backend_dev_get(size_t index);
const char * ggml_backend_dev_name(ggml_backend_dev_t device);
ggml_backend_buffer_type_t ggml_backend_dev_buffer_type(ggml_backend_dev_t device);
const char * ggml_backend_buft_name(ggml_backend_buffer_type_t type);
"""

MODEL_DEFAULTS: dict[str, object] = {
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
    "load_mtp": False,
}
CONTEXT_DEFAULTS: dict[str, object] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_rs_seq": 0,
    "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    "ctx_type": 0,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "rope_freq_base": 0.0,
    "rope_freq_scale": 0.0,
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": -1.0,
    "yarn_beta_fast": -1.0,
    "yarn_beta_slow": -1.0,
    "yarn_orig_ctx": 0,
    "defrag_thold": -1.0,
    "type_k": 1,
    "type_v": 1,
    "moe_cache_size": 0,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "n_samplers": 0,
}
ANCHORS = frozenset(
    {
        "n_ctx",
        "n_batch",
        "n_ubatch",
        "n_seq_max",
        "rope_freq_base",
        "yarn_orig_ctx",
        "type_k",
        "type_v",
        "embeddings",
        "offload_kqv",
        "main_gpu",
        "vocab_only",
        "check_tensors",
    }
)
"""Defaults that have not changed in years: what a library of another version is checked by."""


@dataclass(frozen=True, slots=True)
class Library:
    """An opened llama.cpp that has passed every check."""

    ffi: Any
    lib: Any
    path: Path
    version: str
    build: str  # tells builds of one version apart: the wheel's release, or the file's hash

    def text(self, pointer: Any) -> str:
        """A C string."""
        return "" if pointer == self.ffi.NULL else bytes(self.ffi.string(pointer)).decode(errors="replace")

    def devices(self) -> dict[str, Any]:
        """Devices that can hold tensors, by name: CPU, CUDA0, ..."""
        found = [self.lib.ggml_backend_dev_get(index) for index in range(self.lib.ggml_backend_dev_count())]
        return {self.text(self.lib.ggml_backend_dev_name(device)): device for device in found}


def open_library(path: Path | None = None, *, header: Path | None = None, more: str = "") -> Library:
    """Open llama.cpp: the pinned wheel's, or `path` with the llama.h it was built from; `more` declares further."""
    try:
        from cffi import FFI, CDefError  # noqa: PLC0415 - an extra: planning without it must work
    except ImportError as error:
        raise EngineError("cffi is not installed", hint="pip install 'tokenmill[native]'") from error
    if path is None and header is not None:
        raise EngineError(f"{header} is given without the library that was built from it", hint=OWN_HINT)
    source, hint = (wheel_library(), INSTALL_HINT) if path is None else (path, OWN_HINT)
    structs = STRUCTS if header is None else _structs_of(header)
    ffi = FFI()
    try:
        ffi.cdef(declare(structs) + more)
    except CDefError as error:
        raise EngineError(f"{header} is not understood here: {error}", hint=hint) from error
    if path is not None:
        _load_cpp_runtime(ffi)
    try:
        lib = ffi.dlopen(str(source))
    except OSError as error:
        why = str(error).partition(".  Additionally")[0].removeprefix(f"cannot load library '{source}': ")
        raise EngineError(f"{source} cannot be opened: {why.removeprefix(f'{source}: ')}", hint=hint) from error
    for name in re.findall(r"(\w+)\s*\([^()]*(?:\([^()]*\)[^()]*)*\);", FUNCTIONS + more):
        if not hasattr(lib, name):
            raise EngineError(f"{source} has no function {name}: it is another llama.cpp, or none", hint=hint)
    version = bytes(ffi.string(lib.llama_version())).decode(errors="replace")
    if header is None and version != LLAMA_VERSION:
        raise EngineError(
            f"{source} is llama.cpp {version}, not {LLAMA_VERSION}",
            hint=f"{INSTALL_HINT}, or give the llama.h it was built from as engine.header",
        )
    _check_defaults(FFI, ffi, source, hint, anchored=header is not None)
    return Library(ffi, lib, source, version, _build(source, wheel=path is None))


def _build(source: Path, *, wheel: bool) -> str:
    if wheel:
        return f"{WHEEL} {WHEEL_VERSION}"
    try:
        with source.open("rb") as file:
            return f"{source.name} {hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"
    except OSError:  # a bare name, which the loader found somewhere
        return source.name


def _load_cpp_runtime(ffi: Any) -> None:
    """Put the system's C++ library before all others.

    A CUDA build's libggml-cuda carries parts of it inside, and a program that does not use C++ itself, as Python, finds
    those first: llama.cpp then dies in a regular expression.
    """
    with suppress(OSError):  # where it has another name, nothing of this happens either
        _CPP.append(ffi.dlopen("libstdc++.so.6", ffi.RTLD_NOW | ffi.RTLD_GLOBAL))


_CPP: list[Any] = []  # kept open for good


def wheel_library() -> Path:
    """The shared object inside the installed wheel, which must be the pinned one."""
    spec = find_spec(WHEEL)
    if spec is None or spec.origin is None:
        raise EngineError(f"{WHEEL} is not installed: no llama.cpp to run", hint=INSTALL_HINT)
    installed = metadata.version(WHEEL)
    if installed.partition("+")[0] != WHEEL_VERSION:  # +cu128 and the like are the same build for other devices
        raise EngineError(
            f"{WHEEL} {installed} is installed, but this tokenmill speaks to {WHEEL_VERSION}", hint=INSTALL_HINT
        )
    found = sorted(Path(spec.origin).parent.glob(f"{WHEEL}*.so"))
    if not found:
        raise EngineError(f"{WHEEL} {installed} holds no shared object", hint=INSTALL_HINT)
    return found[0]


def declare(structs: Mapping[str, str]) -> str:
    """Everything cffi has to know."""
    bodies = "".join(f"struct {name} {{ {body} }};\n" for name, body in structs.items())
    return TYPES + bodies + FUNCTIONS


def structs_in(header: str) -> dict[str, str]:
    """The parameter structures as a llama.h declares them, with every pointer and enumeration made plain."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", header, flags=re.DOTALL)
    found = {}
    for name, ours in STRUCTS.items():
        match = re.search(rf"struct {name}\s*\{{(.*?)\}};", text, flags=re.DOTALL)
        if match is None:
            raise EngineError(f"the header declares no struct {name}: is it llama.h?", hint=OWN_HINT)
        fields = [field.strip() for field in match[1].split(";") if field.strip()]
        missing = _names(ours) - _names(match[1])
        needed = missing & {"n_ctx", "n_batch", "n_ubatch", "n_seq_max", "type_k", "type_v", "no_alloc", "load_mode"}
        if needed:
            raise EngineError(
                f"the header's {name} has no {', '.join(sorted(needed))}: this llama.cpp is too old for a dry run",
                hint=INSTALL_HINT,
            )
        found[name] = "".join(_plain(field) for field in fields)
    return found


def differences(found: Mapping[str, object], expected: Mapping[str, object]) -> list[str]:
    """What is not as it must be, in words: `n_batch is 4, not 2048`."""
    return [
        f"{name} is {found[name]}, not {value}"
        for name, value in expected.items()
        if name in found and found[name] != value
    ]


def _check_defaults(maker: Any, ffi: Any, source: Path, hint: str, *, anchored: bool) -> None:
    """Both parameter structures must come back with their known defaults, or their layout is another."""
    # A library with a longer structure would write past ours: ask for it with room to spare.
    roomy = maker()
    roomy.cdef("struct roomy { uint64_t words[256]; };")
    roomy.cdef("struct roomy llama_model_default_params(void); struct roomy llama_context_default_params(void);")
    lib = roomy.dlopen(str(source))
    for kind, defaults in (("model", MODEL_DEFAULTS), ("context", CONTEXT_DEFAULTS)):
        raw = getattr(lib, f"llama_{kind}_default_params")()
        params = ffi.new(f"struct llama_{kind}_params *")
        ffi.memmove(params, roomy.buffer(roomy.addressof(raw)), ffi.sizeof(params[0]))
        found = {name: _value(ffi, params, name, field) for name, field in ffi.typeof(params[0]).fields}
        expected = {name: value for name, value in defaults.items() if name in ANCHORS} if anchored else defaults
        wrong = differences(found, expected)
        if wrong:
            raise EngineError(f"{source} lays out its {kind} parameters differently: {'; '.join(wrong[:3])}", hint=hint)


def _value(ffi: Any, params: Any, name: str, field: Any) -> object:
    """A field as it is; a bool that is none, because another field lies there, as its byte."""
    if field.type.cname != "_Bool":
        return getattr(params, name)
    byte = ffi.buffer(params)[field.offset][0]
    return bool(byte) if byte in (0, 1) else byte


def _structs_of(header: Path) -> dict[str, str]:
    try:
        return structs_in(header.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise EngineError(f"cannot read {header}: {error.strerror}", hint=OWN_HINT) from error


def _names(body: str) -> set[str]:
    return set(re.findall(r"(\w+)\s*;", body))


def _plain(field: str) -> str:
    """`enum ggml_type type_k` as `int type_k;`, any pointer or callback but those we fill as `void *`."""
    match = re.fullmatch(r"(.*?)(\w+(?:\[\d+\])?)", field, flags=re.DOTALL)
    if match is None:
        raise EngineError(
            f"the header declares {' '.join(field.split())!r}, which is not understood here", hint=INSTALL_HINT
        )
    kind = " ".join(match[1].split())
    name = match[2]
    if name in ("devices", "tensor_buft_overrides", "tensor_split"):
        return f"{kind} {name};"
    if kind.startswith("enum "):
        return f"int {name};"
    if "*" in kind or "callback" in kind:
        return f"void * {name};"
    return f"{kind} {name};"
