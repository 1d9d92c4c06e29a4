"""The real llama.cpp of the xllamacpp wheel, for tests: loads a file in a separate process.

`plan` never reads or maps weights, so it is safe for ghost files; `run` loads a small model and decodes greedily. The
structures are the product's, with additions for decoding.
"""

import argparse
import hashlib
import json
import math
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenmill.native.llama.library import open_library
from tokenmill.native.llama.log import LOG_CONTINUED, LOG_DEBUG
from tokenmill.native.llama.settings import LOAD_MODE_NONE

DECODING = """
typedef struct llama_vocab llama_vocab;
typedef struct llama_batch {
    int32_t n_tokens; int32_t * token; float * embd; int32_t * pos; int32_t * n_seq_id; int32_t ** seq_id;
    int8_t * logits;
} llama_batch;
const llama_vocab * llama_model_get_vocab(const llama_model * model);
int32_t llama_vocab_n_tokens(const llama_vocab * vocab);
int32_t llama_tokenize(const llama_vocab * vocab, const char * text, int32_t length, int32_t * tokens,
                       int32_t most, bool add_special, bool parse_special);
int32_t llama_detokenize(const llama_vocab * vocab, const int32_t * tokens, int32_t count, char * text,
                         int32_t most, bool remove_special, bool unparse_special);
llama_batch llama_batch_get_one(int32_t * tokens, int32_t count);
int32_t llama_decode(llama_context * context, llama_batch batch);
float * llama_get_logits_ith(llama_context * context, int32_t index);
"""
FLASH_ATTENTION_ON = 1


@dataclass(frozen=True, slots=True)
class Planned:
    """What llama.cpp would allocate for a model and one context."""

    description: str
    parameters: int
    weight_bytes: int  # of the tensors it would load
    cache_mib: float  # its KV cache, every layer with the whole context
    log: str


@dataclass(frozen=True, slots=True)
class Ran:
    """What llama.cpp did with a small model."""

    description: str
    parameters: int
    vocabulary: int
    prompt: list[int]
    echoed: str  # the prompt's tokens turned back into text
    tokens: list[int]
    finite: bool
    logits_sha256: str
    log: str


def plan(path: Path, *, context: int = 16384) -> Planned:
    """Ask llama.cpp to plan a model without reading its weights."""
    return Planned(**_child("plan", str(path), "--context", str(context)))


def run(path: Path, prompt: str, *, tokens: int = 16, context: int = 512) -> Ran:
    """Load a small model and decode greedily after the prompt."""
    return Ran(**_child("run", str(path), "--context", str(context), "--prompt", prompt, "--tokens", str(tokens)))


def _child(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, f"llama.cpp failed ({done.returncode}):\n{done.stderr[-4000:]}"
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


class Llama:
    """One process's llama.cpp."""

    def __init__(self) -> None:
        library = open_library(more=DECODING)
        self.ffi, self.lib = library.ffi, library.lib
        self.log: list[str] = []
        self._level = LOG_DEBUG
        self._keep = self.ffi.callback("void(int, const char *, void *)")(self._logged)
        self.lib.llama_log_set(self._keep, self.ffi.NULL)
        self.lib.llama_backend_init()

    def _logged(self, level: int, message: Any, _data: Any) -> None:
        self._level = self._level if level == LOG_CONTINUED else level
        if self._level != LOG_DEBUG:
            self.log.append(self.ffi.string(message).decode(errors="replace"))

    def load(self, path: str, *, weights: bool) -> Any:
        params = self.lib.llama_model_default_params()
        # Never with mmap: the kernel would populate a ghost's whole hole.
        params.load_mode = LOAD_MODE_NONE
        params.no_alloc = not weights
        params.use_extra_bufts = False  # no repacked second copy
        params.n_gpu_layers = 0
        model = self.lib.llama_model_load_from_file(path.encode(), params)
        assert model, "".join(self.log)
        return model

    def context(self, model: Any, tokens: int) -> Any:
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = tokens, 512, 512, 1
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = FLASH_ATTENTION_ON
        params.swa_full = True
        context = self.lib.llama_init_from_model(model, params)
        assert context, "".join(self.log)
        return context

    def facts(self, model: Any) -> dict[str, Any]:
        buffer = self.ffi.new("char[256]")
        self.lib.llama_model_desc(model, buffer, 256)
        return {
            "description": self.ffi.string(buffer).decode(),
            "parameters": int(self.lib.llama_model_n_params(model)),
        }

    def tokenize(self, model: Any, prompt: str) -> list[int]:
        raw, tokens = prompt.encode(), self.ffi.new("int32_t[4096]")
        vocabulary = self.lib.llama_model_get_vocab(model)
        count = self.lib.llama_tokenize(vocabulary, raw, len(raw), tokens, 4096, False, True)
        return [int(token) for token in tokens[0:count]]

    def text(self, model: Any, tokens: list[int]) -> str:
        buffer = self.ffi.new("char[65536]")
        vocabulary = self.lib.llama_model_get_vocab(model)
        given = self.ffi.new("int32_t[]", tokens)
        length = self.lib.llama_detokenize(vocabulary, given, len(tokens), buffer, 65536, False, True)
        return bytes(self.ffi.buffer(buffer, length)).decode()

    def greedy(self, model: Any, context: Any, prompt: list[int], count: int) -> tuple[list[int], bool, str]:
        """Tokens, whether every logit was finite, and a digest of all logits."""
        width = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(model))
        pending, made, finite, digest = prompt, [], True, hashlib.sha256()
        for _ in range(count):
            given = self.ffi.new("int32_t[]", pending)
            assert self.lib.llama_decode(context, self.lib.llama_batch_get_one(given, len(pending))) == 0
            logits = self.lib.llama_get_logits_ith(context, -1)
            values = self.ffi.unpack(logits, width)
            finite = finite and all(math.isfinite(value) for value in values)
            digest.update(self.ffi.buffer(logits, 4 * width))
            pending = [max(range(width), key=values.__getitem__)]
            made += pending
        return made, finite, digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("plan", "run"))
    parser.add_argument("path")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--prompt", default="")
    parser.add_argument("--tokens", type=int, default=0)
    given = parser.parse_args()
    llama = Llama()
    model = llama.load(given.path, weights=given.what == "run")
    context = llama.context(model, given.context)
    facts = llama.facts(model)
    result: Planned | Ran
    if given.what == "plan":
        log = "".join(llama.log)
        size = int(llama.lib.llama_model_size(model))
        caches = re.findall(r"llama_kv_cache: size\s*=\s*([0-9.]+) MiB", log)
        result = Planned(**facts, weight_bytes=size, cache_mib=sum(map(float, caches)), log=log)
    else:
        prompt = llama.tokenize(model, given.prompt)
        tokens, finite, digest = llama.greedy(model, context, prompt, given.tokens)
        result = Ran(
            **facts,
            vocabulary=int(llama.lib.llama_vocab_n_tokens(llama.lib.llama_model_get_vocab(model))),
            prompt=prompt,
            echoed=llama.text(model, prompt),
            tokens=tokens,
            finite=finite,
            logits_sha256=digest,
            log="".join(llama.log),
        )
    llama.lib.llama_free(context)
    llama.lib.llama_model_free(model)
    json.dump(asdict(result), sys.stdout)


if __name__ == "__main__":
    main()
