"""A model loaded by llama.cpp: its weights where the plan wants them, and the facts an engine needs about it.

Knows no contexts: any number of them can be made of one model, one after the other, without loading it again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.errors import EngineError
from tokenmill.native.llama.interface import interface_of
from tokenmill.native.llama.library import Library, metadata
from tokenmill.native.llama.log import LOG_DEBUG, LlamaLog
from tokenmill.native.llama.settings import ModelSettings, require_gpu
from tokenmill.native.llama.vocab import Vocab

OnWeightsProgress = Callable[[float], bool]
"""Called with the loaded share, 0 to 1; returns whether to continue."""

# Architectures with compressed caches, which compute several sequences only in streams of their own.
_NO_UNIFIED_CACHE = frozenset({"deepseek4"})


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Metadata of a loaded model."""

    description: str
    architecture: str
    bytes: int
    parameters: int
    trained_context: int
    window: int | None  # tokens that layers with sliding or chunked attention see; None: all layers see everything
    shares: bool  # sequences can share the cells of a prefix
    why_not: str | None  # the reason if they cannot
    cuts: bool = True  # sequences can be cut back; a recurrent state cannot, so it is shared only as it is
    per_slot_caches: bool = True  # contexts can have a KV cache for each slot


class LlamaModel:
    """Weights in memory. Close its contexts first: closing the model while one exists crashes the process."""

    def __init__(self, library: Library, log: LlamaLog, pointer: Any, path: Path, settings: ModelSettings) -> None:
        self.library = library
        self.log = log
        self.path = path
        self.settings = settings
        self._pointer = pointer
        self.facts = _facts(library, pointer)
        self.vocab = Vocab(library, pointer, log)

    @classmethod
    def load(
        cls,
        library: Library,
        path: Path,
        settings: ModelSettings,
        progress: OnWeightsProgress | None = None,
        *,
        log: LlamaLog | None = None,
        vocab_only: bool = False,
    ) -> "LlamaModel":
        """Load a GGUF file, or a split one by its first file; EngineError with llama.cpp's own words if it cannot.

        `vocab_only` leaves the weights out: the model then has a vocabulary and can do nothing else.
        """
        log = LlamaLog(library) if log is None else log
        if not path.is_file():
            raise EngineError(f"no model file at {path}", hint="tokenmill models ls shows what is here")
        library.lib.llama_backend_init()
        if settings.gpus and settings.gpu_layers and not vocab_only:
            require_gpu(library)
        wanted = interface_of(library).model(library, settings, vocab_only=vocab_only)
        params, kept = wanted.struct, wanted.kept
        if progress is not None:
            call = library.ffi.callback(
                "bool(float, void *)", error=False, onerror=lambda *error: failed.append(error[1])
            )
            kept.append(call(lambda share, _: progress(share)))
            params.progress_callback = library.ffi.cast("void *", kept[-1])
        mark = log.mark()
        failed: list[BaseException] = []  # C code cannot pass them on
        pointer = library.lib.llama_model_load_from_file(str(path).encode(), params)
        if failed:
            raise failed[0]
        if pointer == library.ffi.NULL:
            raise EngineError(_failure(path, log, mark), hint=_hint(log, mark))
        return cls(library, log, pointer, path, settings)

    @property
    def pointer(self) -> Any:
        """llama.cpp's own handle."""
        if self._pointer is None:
            raise EngineError(f"{self.path.name} is no longer loaded")
        return self._pointer

    def metadata(self, key: str) -> str | None:
        """A scalar of the file's metadata as text; None: it has none of that name."""
        return metadata(self.library, self.pointer, key)

    def close(self) -> None:
        """Free the weights."""
        if self._pointer is not None:
            self.vocab.close()
            self.library.lib.llama_model_free(self._pointer)
            self._pointer = None


def _failure(path: Path, log: LlamaLog, mark: int) -> str:
    error = log.error(mark)
    return f"llama.cpp cannot load {path.name}" + (f": {error}" if error else "")


def _hint(log: LlamaLog, mark: int) -> str | None:
    said = " ".join(log.since(mark)).lower()
    if "unknown model architecture" in said:
        return "this build does not know the model: name a newer libllama.so with its llama.h in the configuration"
    if "unable to allocate" in said or "failed to allocate" in said or "out of memory" in said:
        return "there was too little memory: tokenmill plan shows what the model needs"
    return " | ".join(log.since(mark, least=LOG_DEBUG + 1)[-4:]) or None


def _facts(library: Library, pointer: Any) -> ModelMetadata:
    lib = library.lib
    text = library.ffi.new("char[]", 256)
    lib.llama_model_desc(pointer, text, 256)
    window = int(lib.llama_model_n_swa(pointer))
    architecture = metadata(library, pointer, "general.architecture") or ""
    why_not = _why_not_share(library, pointer, architecture)
    return ModelMetadata(
        description=library.text(text),
        architecture=architecture,
        bytes=int(lib.llama_model_size(pointer)),
        parameters=int(lib.llama_model_n_params(pointer)),
        trained_context=int(lib.llama_model_n_ctx_train(pointer)),
        window=window or None,
        shares=why_not is None,
        why_not=why_not,
        cuts=not (lib.llama_model_is_recurrent(pointer) or lib.llama_model_is_hybrid(pointer)),
        per_slot_caches=interface_of(library).per_slot_caches,
    )


def _why_not_share(library: Library, pointer: Any, architecture: str) -> str | None:
    lib = library.lib
    if lib.llama_model_has_encoder(pointer):
        return "an encoder's output belongs to one sequence"
    if lib.llama_model_is_diffusion(pointer):
        return "a diffusion model does not decode token by token"
    if library.is_ik and (lib.llama_model_is_recurrent(pointer) or lib.llama_model_is_hybrid(pointer)):
        return "ik_llama.cpp keeps one recurrent state per sequence that cannot be shared"
    if architecture in _NO_UNIFIED_CACHE:
        return "its compressed cache belongs to one sequence"
    return None
