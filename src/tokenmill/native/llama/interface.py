"""What differs between llama.cpp's and ik_llama.cpp's C interface: parameter structures, and what contexts can do.

Functions have llama.cpp's names on `Library.lib` either way; `ik_llama` translates those of ik_llama.cpp.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenmill.errors import EngineError
from tokenmill.native.llama.library import Library
from tokenmill.native.llama.settings import LOAD_MODES, ContextSettings, ModelSettings, cache_type, place
from tokenmill.version import INSTALL_HINT

_MLA_FLASH = 3  # ik_llama.cpp's latent attention with flash attention, which its own server uses


@dataclass(frozen=True, slots=True)
class Parameters:
    """A parameter structure, and the objects that it points to."""

    struct: Any
    kept: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Abort:
    """The callback that is asked during a batch whether to abort it."""

    callback: Any
    data: Any


class Interface(Protocol):
    """The differences that callers of `Library.lib` see."""

    per_slot_caches: bool  # contexts can have a KV cache for each slot
    reports_aborts: bool  # llama_decode returns 2 for an aborted batch; otherwise its logits are not valid

    def model(self, library: Library, settings: ModelSettings, *, vocab_only: bool) -> Parameters:
        """Parameters that load a model with these settings."""

    def context(self, library: Library, settings: ContextSettings, *, ids: int, abort: Abort) -> Parameters:
        """Parameters of a context with `ids` sequences; EngineError for settings that the library does not have."""


class LlamaCpp:
    """llama.cpp."""

    per_slot_caches = True
    reports_aborts = True

    def model(self, library: Library, settings: ModelSettings, *, vocab_only: bool) -> Parameters:
        """Parameters that load a model with these settings."""
        params = library.lib.llama_model_default_params()
        kept = _placed(library, params, settings)
        params.use_extra_bufts = settings.repack
        params.vocab_only = vocab_only
        params.load_mode = LOAD_MODES[settings.mmap, settings.mlock]
        if not settings.gpus:
            # An empty list of devices: otherwise even no layers on a GPU takes its memory and copies weights over.
            kept.append(library.ffi.new("ggml_backend_dev_t[]", [library.ffi.NULL]))
            params.devices = kept[-1]
        return Parameters(params, kept)

    def context(self, library: Library, settings: ContextSettings, *, ids: int, abort: Abort) -> Parameters:
        """Parameters of a context with `ids` sequences."""
        params = library.lib.llama_context_default_params()
        _set_common(params, settings, ids, abort)
        params.flash_attn_type = int(settings.flash_attention)
        known = {name for name, _ in library.ffi.typeof(params).fields}  # a library of another version may lack some
        needed: dict[str, Any] = {"kv_unified": not settings.streams, "swa_full": True}
        if settings.moe_cache_bytes:
            needed["moe_cache_size"] = settings.moe_cache_bytes
        if not needed.keys() <= known:
            raise EngineError(
                f"this llama.cpp has no {', '.join(sorted(needed.keys() - known))}",
                hint="plan without --moe-cache" if "kv_unified" in known else INSTALL_HINT,
            )
        # Maximum rows of logits per batch: llama.cpp needs one per id, and by default allocates one per token.
        wishes = {"n_outputs_max": ids, "op_offload": settings.op_offload, "no_perf": True}
        for name, value in {**needed, **{name: wishes[name] for name in wishes.keys() & known}}.items():
            setattr(params, name, value)
        return Parameters(params)


class IkLlama:
    """ik_llama.cpp."""

    per_slot_caches = False
    reports_aborts = False

    def model(self, library: Library, settings: ModelSettings, *, vocab_only: bool) -> Parameters:
        """Parameters that load a model with these settings; repacked weights are read instead of mapped."""
        params = library.lib.llama_model_default_params()
        kept = _placed(library, params, settings)
        params.vocab_only = vocab_only
        params.mla = _MLA_FLASH
        params.repack_tensors = settings.repack and not vocab_only
        params.use_mmap = settings.mmap and not params.repack_tensors
        params.use_mlock = settings.mlock
        return Parameters(params, kept)

    def context(self, library: Library, settings: ContextSettings, *, ids: int, abort: Abort) -> Parameters:
        """Parameters of a context with `ids` sequences, whose cache is always unified."""
        if settings.moe_cache_bytes:
            raise EngineError("ik_llama.cpp has no cache for experts", hint="plan without --moe-cache")
        params = library.lib.llama_context_default_params()
        _set_common(params, settings, ids, abort)
        params.flash_attn = settings.flash_attention
        params.mla_attn = _MLA_FLASH if settings.flash_attention else 1
        return Parameters(params)


def _placed(library: Library, params: Any, settings: ModelSettings) -> list[Any]:
    return place(
        library,
        params,
        gpu_layers=settings.gpu_layers,
        tensor_split=settings.tensor_split,
        overrides=settings.overrides,
    )


def _set_common(params: Any, settings: ContextSettings, ids: int, abort: Abort) -> None:
    params.n_ctx = settings.cells
    params.n_seq_max = ids
    params.n_batch = settings.batch
    params.n_ubatch = min(settings.ubatch, settings.batch)
    params.n_threads = settings.threads
    params.n_threads_batch = settings.threads_batch
    params.type_k = cache_type(settings.cache_type_k)
    params.type_v = cache_type(settings.cache_type_v)
    params.abort_callback = abort.callback
    params.abort_callback_data = abort.data


def interface_of(library: Library) -> Interface:
    """The interface of an opened library."""
    return IkLlama() if library.is_ik else LlamaCpp()
