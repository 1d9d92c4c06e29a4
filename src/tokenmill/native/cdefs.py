"""What a running model needs of llama.cpp's C interface beyond a dry run: batches, memory, vocabulary, samplers, state.

Written from include/llama.h of the pinned build, like `abi`, whose checks also cover these functions. The structures
here have not changed in years. Also the library's log, kept short, from which errors take llama.cpp's own words.
"""

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

from tokenmill.native import abi, breakdown

DECLARATIONS = """
typedef struct llama_vocab llama_vocab;
typedef struct llama_sampler llama_sampler;
typedef struct llama_memory_i * llama_memory_t;
typedef struct llama_batch {
    int32_t n_tokens; int32_t * token; float * embd; int32_t * pos; int32_t * n_seq_id; int32_t ** seq_id;
    int8_t * logits;
} llama_batch;
typedef struct llama_token_data { int32_t id; float logit; float p; } llama_token_data;
typedef struct llama_token_data_array {
    llama_token_data * data; size_t size; int64_t selected; bool sorted;
} llama_token_data_array;
typedef struct llama_logit_bias { int32_t token; float bias; } llama_logit_bias;
struct llama_sampler_chain_params { bool no_perf; };

int32_t llama_model_n_ctx_train(const llama_model * model);
int32_t llama_model_n_swa(const llama_model * model);
bool llama_model_has_encoder(const llama_model * model);
bool llama_model_has_decoder(const llama_model * model);
bool llama_model_is_recurrent(const llama_model * model);
bool llama_model_is_hybrid(const llama_model * model);
bool llama_model_is_diffusion(const llama_model * model);
int32_t llama_model_meta_val_str(const llama_model * model, const char * key, char * buffer, size_t size);
const char * llama_model_chat_template(const llama_model * model, const char * name);
const llama_vocab * llama_model_get_vocab(const llama_model * model);

uint32_t llama_n_batch(const llama_context * context);
uint32_t llama_n_ubatch(const llama_context * context);
uint32_t llama_n_seq_max(const llama_context * context);
llama_memory_t llama_get_memory(const llama_context * context);
void llama_set_n_threads(llama_context * context, int32_t threads, int32_t threads_batch);
int32_t llama_n_threads(llama_context * context);
int32_t llama_n_threads_batch(llama_context * context);
int32_t llama_decode(llama_context * context, llama_batch batch);
void llama_synchronize(llama_context * context);
float * llama_get_logits(llama_context * context);

void llama_memory_clear(llama_memory_t memory, bool data);
bool llama_memory_seq_rm(llama_memory_t memory, int32_t sequence, int32_t start, int32_t end);
void llama_memory_seq_cp(llama_memory_t memory, int32_t source, int32_t target, int32_t start, int32_t end);
int32_t llama_memory_seq_pos_min(llama_memory_t memory, int32_t sequence);
int32_t llama_memory_seq_pos_max(llama_memory_t memory, int32_t sequence);
size_t llama_state_seq_get_size(llama_context * context, int32_t sequence);
size_t llama_state_seq_get_data(llama_context * context, uint8_t * target, size_t size, int32_t sequence);
size_t llama_state_seq_set_data(llama_context * context, const uint8_t * source, size_t size, int32_t sequence);

int llama_vocab_type(const llama_vocab * vocab);
int32_t llama_vocab_n_tokens(const llama_vocab * vocab);
const char * llama_vocab_get_text(const llama_vocab * vocab, int32_t token);
int llama_vocab_get_attr(const llama_vocab * vocab, int32_t token);
bool llama_vocab_is_eog(const llama_vocab * vocab, int32_t token);
int32_t llama_vocab_bos(const llama_vocab * vocab);
int32_t llama_vocab_eos(const llama_vocab * vocab);
int32_t llama_vocab_eot(const llama_vocab * vocab);
bool llama_vocab_get_add_bos(const llama_vocab * vocab);
bool llama_vocab_get_add_eos(const llama_vocab * vocab);
const int32_t * llama_vocab_get_suppress_tokens(const llama_vocab * vocab, int32_t * count);
int32_t llama_tokenize(const llama_vocab * vocab, const char * text, int32_t length, int32_t * tokens, int32_t most,
                       bool add_special, bool parse_special);
int32_t llama_token_to_piece(const llama_vocab * vocab, int32_t token, char * buffer, int32_t length, int32_t lstrip,
                             bool special);

struct llama_sampler_chain_params llama_sampler_chain_default_params(void);
llama_sampler * llama_sampler_chain_init(struct llama_sampler_chain_params params);
void llama_sampler_chain_add(llama_sampler * chain, llama_sampler * sampler);
void llama_sampler_accept(llama_sampler * sampler, int32_t token);
void llama_sampler_apply(llama_sampler * sampler, llama_token_data_array * candidates);
void llama_sampler_free(llama_sampler * sampler);
llama_sampler * llama_sampler_init_greedy(void);
llama_sampler * llama_sampler_init_dist(uint32_t seed);
llama_sampler * llama_sampler_init_top_k(int32_t k);
llama_sampler * llama_sampler_init_top_p(float p, size_t min_keep);
llama_sampler * llama_sampler_init_min_p(float p, size_t min_keep);
llama_sampler * llama_sampler_init_xtc(float p, float t, size_t min_keep, uint32_t seed);
llama_sampler * llama_sampler_init_temp_ext(float t, float delta, float exponent);
llama_sampler * llama_sampler_init_penalties(int32_t n_vocab, int32_t last_n, float repeat, float freq, float present);
llama_sampler * llama_sampler_init_logit_bias(int32_t n_vocab, int32_t count, const llama_logit_bias * biases);
"""

LOG_ERROR = 4
MOST_IDS = 256  # sequences in one context; the wheel does not export the function that says so
_LOGS: "dict[Path, WeakSet[Log]]" = {}
_CALLBACKS: dict[Path, Any] = {}  # the library calls them whenever it likes: they must outlive every user


def open_running(path: Path | None = None, *, header: Path | None = None) -> abi.Library:
    """Open llama.cpp to run models: the pinned wheel's, or a libllama.so with the llama.h it was built from."""
    more = DECLARATIONS + (breakdown.DECLARATIONS if breakdown.readable() else "")
    return abi.open_library(path, header=header, more=more)


def metadata(library: abi.Library, model: Any, key: str) -> str | None:
    """A scalar of a model file's metadata as text; None: it has none of that name."""
    size = int(library.lib.llama_model_meta_val_str(model, key.encode(), library.ffi.NULL, 0))
    if size < 0:
        return None
    text = library.ffi.new("char[]", size + 1)
    library.lib.llama_model_meta_val_str(model, key.encode(), text, size + 1)
    return bytes(library.ffi.buffer(text, size)).decode(errors="replace")


class Log:
    """llama.cpp's log: its last lines, and each finished line handed to `sink`.

    A library has one callback, for good, and every log of it hears the same. Lines come from any thread.
    """

    def __init__(
        self, library: abi.Library, *, keep_lines: int = 400, sink: Callable[[int, str], None] | None = None
    ) -> None:
        self._sink = sink
        self._lines: deque[tuple[int, str]] = deque(maxlen=keep_lines)
        self._lock = threading.Lock()
        self._level = abi.LOG_DEBUG
        self._part = ""
        self._count = 0
        logs = _LOGS.setdefault(library.path, WeakSet())
        logs.add(self)
        if library.path not in _CALLBACKS:

            def logged(level: int, message: Any, _data: Any) -> None:
                text = library.text(message)
                for log in tuple(logs):
                    log.hear(level, text)

            _CALLBACKS[library.path] = library.ffi.callback("void(int, const char *, void *)")(logged)
            library.lib.llama_log_set(_CALLBACKS[library.path], library.ffi.NULL)

    def lines(self, *, least: int = abi.LOG_DEBUG + 1) -> tuple[str, ...]:
        """The last lines, oldest first, from a level on."""
        return tuple(line for level, line in tuple(self._lines) if level >= least)

    def last(self, count: int = 4) -> str | None:
        """The end of the log in one line, as the hint of an error."""
        return " | ".join(self.lines()[-count:]) or None

    def mark(self) -> int:
        """A point in the log, to ask for what came after it."""
        return self._count

    def since(self, mark: int, *, least: int = abi.LOG_DEBUG) -> tuple[str, ...]:
        """Lines after a mark, as far as they are kept."""
        new = min(self._count - mark, len(self._lines))
        return tuple(line for level, line in tuple(self._lines)[-new:] if level >= least) if new > 0 else ()

    def error(self, mark: int) -> str | None:
        """The first error after a mark: the ones that follow only repeat that something failed."""
        return next(iter(self.since(mark, least=LOG_ERROR)), None)

    def hear(self, level: int, text: str) -> None:
        """Take what the library says: lines, or parts of one."""
        with self._lock:
            if level != abi.LOG_CONTINUED:
                self._level = level
            *whole, self._part = (self._part + text).split("\n")
            whole = [line.rstrip() for line in whole if line.strip(" .")]
            self._lines.extend((self._level, line) for line in whole)
            self._count += len(whole)
            level = self._level
        if self._sink is not None:
            for line in whole:
                self._sink(level, line)
