"""ik_llama.cpp's C interface, which is older than llama.cpp's, under the names of llama.cpp's.

`declarations` reads the parameter structures from its llama.h. `IkFunctions` offers the functions of `cdefs`: those
that ik_llama.cpp has are its own, the others are translated. Samplers, which need no model, are those of the llama.cpp
in the wheel. ik_llama.cpp does not report aborted batches, and its batches need contiguous cells: see `llama_decode`.
"""

import re
from typing import Any

from tokenmill.errors import EngineError

_STRUCTS = ("llama_model_tensor_buft_override", "llama_model_params", "llama_context_params", "llama_batch")
_MAX_DEFRAGS = 64  # each moves a limited number of cells
_TYPES = """
typedef struct ggml_backend_buffer_type * ggml_backend_buffer_type_t;
typedef struct llama_model llama_model;
typedef struct llama_context llama_context;
typedef struct llama_vocab llama_vocab;
"""
FUNCTIONS = """
const char * llama_print_system_info(void);
void llama_log_set(void (*callback)(int level, const char * text, void * data), void * data);
void llama_backend_init(void);
struct llama_model_params llama_model_default_params(void);
struct llama_context_params llama_context_default_params(void);
llama_model * llama_model_load_from_file(const char * path, struct llama_model_params params);
llama_context * llama_init_from_model(llama_model * model, struct llama_context_params params);
void llama_free(llama_context * context);
void llama_free_model(llama_model * model);
uint64_t llama_model_size(const llama_model * model);
uint64_t llama_model_n_params(const llama_model * model);
int32_t llama_model_desc(const llama_model * model, char * buffer, size_t size);
uint32_t llama_n_ctx(const llama_context * context);
size_t llama_max_devices(void);
ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type(void);
const char * ggml_backend_buft_name(ggml_backend_buffer_type_t type);

int32_t llama_n_ctx_train(const llama_model * model);
bool llama_model_has_encoder(const llama_model * model);
bool llama_model_has_decoder(const llama_model * model);
bool llama_model_is_recurrent(const llama_model * model);
bool llama_model_is_hybrid(const llama_model * model);
int32_t llama_model_meta_val_str(const llama_model * model, const char * key, char * buffer, size_t size);
const char * llama_model_chat_template(const llama_model * model, const char * name);
const llama_vocab * llama_model_get_vocab(const llama_model * model);

uint32_t llama_n_batch(const llama_context * context);
uint32_t llama_n_ubatch(const llama_context * context);
uint32_t llama_n_seq_max(const llama_context * context);
void llama_set_n_threads(llama_context * context, uint32_t threads, uint32_t threads_batch);
int32_t llama_decode(llama_context * context, struct llama_batch batch);
void llama_synchronize(llama_context * context);
float * llama_get_logits(llama_context * context);

void llama_kv_cache_clear(llama_context * context);
bool llama_kv_cache_seq_rm(llama_context * context, int32_t sequence, int32_t start, int32_t end);
void llama_kv_cache_seq_cp(llama_context * context, int32_t source, int32_t target, int32_t start, int32_t end);
int32_t llama_kv_cache_seq_pos_min(llama_context * context, int32_t sequence);
int32_t llama_kv_cache_seq_pos_max(llama_context * context, int32_t sequence);
void llama_kv_cache_defrag(llama_context * context);
int32_t llama_kv_cache_update(llama_context * context);
size_t llama_state_seq_get_size(llama_context * context, int32_t sequence, uint32_t flags);
size_t llama_state_seq_get_data(llama_context * context, uint8_t * target, size_t size, int32_t sequence,
                                uint32_t flags);
size_t llama_state_seq_set_data(llama_context * context, const uint8_t * source, size_t size, int32_t sequence,
                                uint32_t flags);

int llama_vocab_type(const llama_vocab * vocab);
int32_t llama_vocab_n_tokens(const llama_vocab * vocab);
const char * llama_vocab_get_text(const llama_vocab * vocab, int32_t token);
bool llama_vocab_is_eog(const llama_vocab * vocab, int32_t token);
int32_t llama_vocab_bos(const llama_vocab * vocab);
int32_t llama_vocab_eos(const llama_vocab * vocab);
bool llama_vocab_get_add_bos(const llama_vocab * vocab);
bool llama_vocab_get_add_eos(const llama_vocab * vocab);
int llama_token_get_attr(const llama_model * model, int32_t token);
int32_t llama_token_eot(const llama_model * model);
int32_t llama_vocab_tokenize(const llama_vocab * vocab, const char * text, int32_t length, int32_t * tokens,
                             int32_t most, bool add_special, bool parse_special);
int32_t llama_token_to_piece_vocab(const llama_vocab * vocab, int32_t token, char * buffer, int32_t length,
                                   int32_t lstrip, bool special);
"""
_CUDA_FUNCTIONS = """
ggml_backend_buffer_type_t ggml_backend_cuda_buffer_type(int device);
int ggml_backend_cuda_get_device_count(void);
"""  # in builds with CUDA only
VERSION = "ik_llama.cpp"  # its library does not tell which
MAX_SEQUENCES = 16384  # the cells of ik_llama.cpp keep sets of ids, without a limit of their own


def is_header(text: str) -> bool:
    """Whether a llama.h is ik_llama.cpp's."""
    return "llama_kv_cache_seq_rm" in text and "mla_attn" in text


def declarations(header: str) -> str:
    """Declarations for cffi, with the structures of this llama.h; EngineError if it lacks one."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", header, flags=re.DOTALL)
    bodies = []
    for name in _STRUCTS:
        match = re.search(rf"struct {name}\s*\{{(.*?)\}}", text, flags=re.DOTALL)
        if match is None:
            raise EngineError(f"the header declares no struct {name}: is it ik_llama.cpp's llama.h?")
        fields = "".join(f"{_plain(field)};" for field in match[1].split(";") if field.strip())
        bodies.append(f"struct {name} {{ {fields} }};\ntypedef struct {name} {name};\n")
    return _TYPES + "".join(bodies) + FUNCTIONS + _CUDA_FUNCTIONS


def _plain(field: str) -> str:
    """A structure's field with enumerations and token ids as integers and callbacks as `void *`."""
    words = " ".join(field.split())
    words = re.sub(r"\benum \w+", "int", words)
    words = re.sub(r"\bllama_(token|pos|seq_id)\b", "int32_t", words)
    words = re.sub(r"\b\w+_callback (?=\w)", "void * ", words)
    return re.sub(r"const struct llama_model_kv_override \*", "const void *", words)


class IkFunctions:
    """The functions of an opened ik_llama.cpp by llama.cpp's names."""

    def __init__(self, ffi: Any, lib: Any, samplers: Any) -> None:
        """`samplers`: a library with llama.cpp's samplers."""
        self._ffi = ffi
        self._lib = lib
        self._samplers = samplers
        self._models: dict[int, Any] = {}  # by address of their vocabulary
        self._names = [ffi.new("char[]", name.encode()) for name in self._device_names()]

    def __getattr__(self, name: str) -> Any:
        """A function whose name and arguments are the same; samplers are those of llama.cpp."""
        source = self._samplers if name.startswith("llama_sampler_") else self._lib
        function = getattr(source, name)
        setattr(self, name, function)  # not looked up again
        return function

    def _device_names(self) -> list[str]:
        try:
            cards = int(self._lib.ggml_backend_cuda_get_device_count())
        except AttributeError:
            cards = 0
        return ["CPU", *(f"CUDA{number}" for number in range(cards))]

    # ---- devices

    def ggml_backend_dev_count(self) -> int:
        """The processors and the cards."""
        return len(self._names)

    def ggml_backend_dev_get(self, index: int) -> int:
        """A device, which is its index."""
        return index

    def ggml_backend_dev_name(self, device: int) -> Any:
        """Its name as a C string."""
        return self._names[device]

    def ggml_backend_dev_buffer_type(self, device: int) -> Any:
        """The buffer type of its memory."""
        if device == 0:
            return self._lib.ggml_backend_cpu_buffer_type()
        return self._lib.ggml_backend_cuda_buffer_type(device - 1)

    # ---- models

    def llama_model_free(self, model: Any) -> None:
        """Free a model."""
        self._lib.llama_free_model(model)

    def llama_model_n_ctx_train(self, model: Any) -> int:
        """The trained context."""
        return int(self._lib.llama_n_ctx_train(model))

    def llama_model_n_swa(self, model: Any) -> int:
        """0: cells of layers with sliding windows are kept like all others."""
        del model
        return 0

    def llama_model_is_diffusion(self, model: Any) -> bool:
        """False: ik_llama.cpp loads no diffusion models."""
        del model
        return False

    # ---- cells: a context is its own memory

    def llama_get_memory(self, context: Any) -> Any:
        """The context itself."""
        return context

    def llama_memory_clear(self, memory: Any, data: bool) -> None:
        """Empty all sequences."""
        del data
        self._lib.llama_kv_cache_clear(memory)

    def llama_memory_seq_rm(self, memory: Any, sequence: int, start: int, end: int) -> bool:
        """Remove positions of a sequence."""
        return bool(self._lib.llama_kv_cache_seq_rm(memory, sequence, start, end))

    def llama_memory_seq_cp(self, memory: Any, source: int, target: int, start: int, end: int) -> None:
        """Share positions of a sequence with another."""
        self._lib.llama_kv_cache_seq_cp(memory, source, target, start, end)

    def llama_memory_seq_pos_min(self, memory: Any, sequence: int) -> int:
        """The first position, -1 for an empty sequence."""
        return int(self._lib.llama_kv_cache_seq_pos_min(memory, sequence))

    def llama_memory_seq_pos_max(self, memory: Any, sequence: int) -> int:
        """The last position, -1 for an empty sequence, for which ik_llama.cpp returns 0."""
        last = int(self._lib.llama_kv_cache_seq_pos_max(memory, sequence))
        return last if last > 0 or self.llama_memory_seq_pos_min(memory, sequence) == 0 else -1

    def llama_state_seq_get_size(self, context: Any, sequence: int) -> int:
        """Bytes of a sequence's state."""
        return int(self._lib.llama_state_seq_get_size(context, sequence, 0))

    def llama_state_seq_get_data(self, context: Any, target: Any, size: int, sequence: int) -> int:
        """Copy a sequence's state."""
        return int(self._lib.llama_state_seq_get_data(context, target, size, sequence, 0))

    def llama_state_seq_set_data(self, context: Any, source: Any, size: int, sequence: int) -> int:
        """Restore a sequence's state."""
        return int(self._lib.llama_state_seq_set_data(context, source, size, sequence, 0))

    def llama_decode(self, context: Any, batch: Any) -> int:
        """Compute a batch; returns 1, with nothing computed, if there is no room for it.

        Each micro-batch needs contiguous cells, so cells are moved together first.
        """
        code = int(self._lib.llama_decode(context, batch))
        for _ in range(_MAX_DEFRAGS):
            if code != 1:
                break
            self._remove(context, batch)
            self._lib.llama_kv_cache_defrag(context)
            self._lib.llama_kv_cache_update(context)
            code = int(self._lib.llama_decode(context, batch))
        if code == 1:
            self._remove(context, batch)
        return code

    def _remove(self, context: Any, batch: Any) -> None:
        """Remove the cells of micro-batches that were computed before one found no room."""
        first: dict[int, int] = {}
        for index in range(batch.n_tokens):
            for owner in range(batch.n_seq_id[index]):
                sequence = int(batch.seq_id[index][owner])
                position = int(batch.pos[index])
                first[sequence] = min(position, first.get(sequence, position))
        for sequence, position in first.items():
            self._lib.llama_kv_cache_seq_rm(context, sequence, position, -1)

    # ---- vocabulary

    def llama_model_get_vocab(self, model: Any) -> Any:
        """The vocabulary of a model."""
        vocab = self._lib.llama_model_get_vocab(model)
        self._models[int(self._ffi.cast("uintptr_t", vocab))] = model
        return vocab

    def _model_of(self, vocab: Any) -> Any:
        return self._models[int(self._ffi.cast("uintptr_t", vocab))]

    def llama_vocab_get_attr(self, vocab: Any, token: int) -> int:
        """The attributes of a token, with the bits of llama.cpp."""
        return int(self._lib.llama_token_get_attr(self._model_of(vocab), token))

    def llama_vocab_eot(self, vocab: Any) -> int:
        """The token that ends a turn; -1 for a vocabulary without one."""
        return int(self._lib.llama_token_eot(self._model_of(vocab)))

    def llama_vocab_get_suppress_tokens(self, vocab: Any, count: Any) -> Any:
        """No tokens: ik_llama.cpp does not read them from the model."""
        del vocab
        count[0] = 0
        return self._ffi.NULL

    def llama_tokenize(
        self, vocab: Any, text: bytes, length: int, tokens: Any, most: int, add_special: bool, parse_special: bool
    ) -> int:
        """Tokens of a text."""
        return int(self._lib.llama_vocab_tokenize(vocab, text, length, tokens, most, add_special, parse_special))

    def llama_token_to_piece(self, vocab: Any, token: int, buffer: Any, length: int, lstrip: int, special: bool) -> int:
        """The text of a token."""
        return int(self._lib.llama_token_to_piece_vocab(vocab, token, buffer, length, lstrip, special))
