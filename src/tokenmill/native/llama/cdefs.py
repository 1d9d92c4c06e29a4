"""Declarations of llama.cpp's C interface, from include/llama.h of the pinned build.

`TYPES`, `STRUCTS` and `FUNCTIONS` suffice to load a model and to project its memory; `RUNNING_FUNCTIONS` adds batches,
sequences, vocabulary and samplers. The defaults are those that the library must return for its parameter structures.
"""

import platform
import sys

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

OPTIONAL_FUNCTIONS = "size_t llama_max_parallel_sequences(void);"  # not exported by the wheel

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
"""Defaults that have not changed in years, used to check a library of another version."""

RUNNING_FUNCTIONS = """
typedef struct llama_vocab llama_vocab;
typedef struct llama_memory_i * llama_memory_t;
typedef struct llama_batch {
    int32_t n_tokens; int32_t * token; float * embd; int32_t * pos; int32_t * n_seq_id; int32_t ** seq_id;
    int8_t * logits;
} llama_batch;

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
"""

SAMPLERS = """
typedef struct llama_sampler llama_sampler;
typedef struct llama_token_data { int32_t id; float logit; float p; } llama_token_data;
typedef struct llama_token_data_array {
    llama_token_data * data; size_t size; int64_t selected; bool sorted;
} llama_token_data_array;
typedef struct llama_logit_bias { int32_t token; float bias; } llama_logit_bias;
struct llama_sampler_chain_params { bool no_perf; };

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
"""Samplers, which need no model."""

BREAKDOWN_SYMBOL = "_Z26llama_get_memory_breakdownPK13llama_context"
BREAKDOWN = f"""
struct tm_node {{
    uint64_t colour; struct tm_node * parent; struct tm_node * left; struct tm_node * right;
    ggml_backend_buffer_type_t type; size_t model; size_t context; size_t compute;
}};
struct tm_map {{
    uint64_t compare; uint64_t colour; struct tm_node * root; struct tm_node * first; struct tm_node * last;
    size_t count;
}};
struct tm_map {BREAKDOWN_SYMBOL}(const llama_context * context);
"""
"""The bytes of a context by buffer type: libstdc++'s std::map on 64-bit Linux, which `breakdown.py` reads."""


def breakdown_readable() -> bool:
    """Whether the layout of that map is known on this machine."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") and sys.maxsize > 2**32
