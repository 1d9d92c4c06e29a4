"""The tokens that may come next in an answer that must follow a grammar (GBNF) or a JSON schema.

llama.cpp's own sampler follows grammars. llguidance follows schemas, as in llama-server: the wheel holds it; for a
libllama.so without it, schema_gbnf.py translates the schema to a grammar. Compiling is slow and can take any amount of
memory: the worker does it through compiler.py. Cloning a compiled constraint is cheap and never waits for a compile.
"""

import math
import threading
from collections import OrderedDict
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tokenmill.engine.engine import Sampling
from tokenmill.errors import EngineError, RequestRefused
from tokenmill.native.abi import Library
from tokenmill.native.cdefs import standard_error
from tokenmill.native.grammar import check_size, grammar_of
from tokenmill.native.schema_gbnf import gbnf_of
from tokenmill.native.vocab import Vocab

_PARSING = "error parsing grammar"  # the beginning of llama.cpp's message
CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Constraint(Protocol):
    """Decides which tokens may come next."""

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""

    def restrict(self, candidates: NDArray[Any], array: Any) -> None:
        """Set the logit of every token that may not come next to -inf; candidates are in the order of their ids."""

    def accept(self, token: int) -> None:
        """Advance by a token, which must be allowed."""

    def clone(self) -> "Constraint":
        """A copy in the same state."""

    def close(self) -> None:
        """Free the native object; also done when the constraint is garbage collected."""


class Grammar:
    """A GBNF grammar."""

    def __init__(self, vocab: Vocab, text: str) -> None:
        check_size(text)
        if "\0" in text:
            raise RequestRefused("the grammar holds a NUL character")
        lib = vocab.library.lib
        mark = vocab.log.mark()
        with standard_error(_PARSING) as printed:
            sampler = lib.llama_sampler_init_grammar(vocab.pointer, text.encode(), b"root")
        if sampler == vocab.library.ffi.NULL:
            said = [line for line in printed().splitlines() if _PARSING in line]
            said += [line for line in vocab.log.since(mark) if line != "failed to parse grammar"]
            why = said[0].rpartition(f"{_PARSING}: ")[2] if said else "llama.cpp does not say why"
            if why == "std::bad_alloc":
                raise MemoryError
            raise RequestRefused(f"the grammar is not valid GBNF: {why[:300]}", hint="it needs a rule called root")
        self._hold(vocab.library, sampler)

    def _hold(self, library: Library, sampler: Any) -> None:
        self._library = library
        self._ffi = library.ffi
        self._lib = library.lib
        self._sampler = library.ffi.gc(sampler, library.lib.llama_sampler_free)
        self._one = self._ffi.new("llama_token_data *")
        self._array = self._ffi.new("llama_token_data_array *")

    def clone(self) -> "Grammar":
        """A copy in the same state."""
        copy = Grammar.__new__(Grammar)
        copy._hold(self._library, self._lib.llama_sampler_clone(self._sampler))
        return copy

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""
        one = self._one
        array = self._array
        one.id = token
        one.logit = 1.0
        one.p = 0.0
        array.data = one
        array.size = 1
        array.selected = -1
        array.sorted = False
        self._lib.llama_sampler_apply(self._sampler, array)
        return float(one.logit) != -math.inf

    def restrict(self, candidates: NDArray[Any], array: Any) -> None:
        """Set the logit of every token that may not come next to -inf."""
        self._lib.llama_sampler_apply(self._sampler, array)

    def accept(self, token: int) -> None:
        """Advance by a token; one that is not allowed would end the process."""
        self._lib.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        """Free the sampler."""
        self._ffi.release(self._sampler)


class Schema:
    """A JSON schema in llguidance's form."""

    def __init__(self, vocab: Vocab, text: str) -> None:
        made = _guidance(vocab).compile(text)
        self._hold(vocab, made)
        error = self._error()
        if error is not None:
            self.close()
            raise _refused(error)

    def _hold(self, vocab: Vocab, matcher: Any) -> None:
        self._vocab = vocab
        self._ffi = vocab.library.ffi
        self._lib = vocab.library.lib
        self._matcher = self._ffi.gc(matcher, self._lib.llg_free_matcher)
        self._mask: NDArray[np.bool_] | None = None

    def clone(self) -> "Schema":
        """A copy in the same state."""
        copy = Schema.__new__(Schema)
        copy._hold(self._vocab, self._lib.llg_clone_matcher(self._matcher))
        return copy

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""
        return bool(self._allowed()[token])

    def restrict(self, candidates: NDArray[Any], array: Any) -> None:
        """Set the logit of every token that may not come next to -inf."""
        candidates["logit"][~self._allowed()] = -np.inf

    def accept(self, token: int) -> None:
        """Advance by a token; RequestRefused where llguidance cannot continue."""
        if token in self._vocab.ends:  # llguidance stops by itself at the end of a document and rejects this token
            return
        self._mask = None
        if self._lib.llg_matcher_consume_token(self._matcher, token):
            raise _refused(self._error())

    def close(self) -> None:
        """Free the matcher."""
        self._ffi.release(self._matcher)

    def _allowed(self) -> NDArray[np.bool_]:
        if self._mask is None:
            if self._lib.llg_matcher_compute_mask(self._matcher):
                raise _refused(self._error())
            bits = self._ffi.buffer(
                self._lib.llg_matcher_get_mask(self._matcher), self._lib.llg_matcher_get_mask_byte_size(self._matcher)
            )
            packed = np.frombuffer(bits, np.uint8)
            self._mask = np.unpackbits(packed, count=self._vocab.n_tokens, bitorder="little").view(np.bool_)
        return self._mask

    def _error(self) -> str | None:
        found = self._lib.llg_matcher_get_error(self._matcher)
        if found == self._ffi.NULL:
            return None
        return bytes(self._ffi.string(found)).decode(errors="replace").partition("\n<state>")[0].strip()


def _refused(error: str | None) -> RequestRefused:
    """The error for a schema that llguidance cannot compile or that no document can satisfy from here on."""
    why = (error or "llguidance does not say why").partition("\n")[0]
    if why == "NoExtensionBias":  # llguidance's reason for a state in which no token is allowed
        why = "no document can satisfy it"
    return RequestRefused(
        f"the JSON schema cannot be followed: {why[:300]}",
        hint="check the schema for parts that contradict each other, or simplify it",
    )


def can_follow_schemas(library: Library) -> bool:
    """Whether the library holds llguidance."""
    return hasattr(library.lib, "llg_new_matcher")


def is_constrained(sampling: Sampling) -> bool:
    """Whether a request has a grammar or a JSON schema."""
    return sampling.json_schema is not None or bool(sampling.grammar)


def constraint_of(vocab: Vocab, sampling: Sampling, context_tokens: int | None = None) -> Constraint | None:
    """A constraint for one request, compiled here unless the cache has it; None: the request has none."""
    if not is_constrained(sampling):
        return None
    cache = _cache(vocab)
    return cache.clone(sampling, context_tokens) or cache.add(vocab, sampling, context_tokens)


def cached_constraint(vocab: Vocab, sampling: Sampling, context_tokens: int) -> Constraint | None:
    """A clone of an already compiled constraint; None where it must be compiled first."""
    return _cache(vocab).clone(sampling, context_tokens)


def compiled(vocab: Vocab, sampling: Sampling, context_tokens: int | None) -> Constraint:
    """Compile the constraint of a request that has one; RequestRefused where that is not possible."""
    if sampling.json_schema is None:
        return Grammar(vocab, sampling.grammar or "")
    if can_follow_schemas(vocab.library):
        return Schema(vocab, grammar_of(sampling.json_schema, context_tokens))
    is_empty = "".join(sampling.json_schema.split()) == "{}"  # any object, as in grammar_of
    return Grammar(vocab, gbnf_of('{"type": "object"}' if is_empty else sampling.json_schema, context_tokens))


class _Cache:
    """Compiled constraints of one vocabulary, at their beginning. Compiling holds no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[object, ...], Constraint] = OrderedDict()

    def clone(self, sampling: Sampling, context_tokens: int | None) -> Constraint | None:
        key = _key(sampling, context_tokens)
        with self._lock:
            found = self._compiled.get(key)
            if found is None:
                return None
            self._compiled.move_to_end(key)
            return found.clone()

    def add(self, vocab: Vocab, sampling: Sampling, context_tokens: int | None) -> Constraint:
        made = compiled(vocab, sampling, context_tokens)
        with self._lock:
            self._compiled[_key(sampling, context_tokens)] = made
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return made.clone()

    def close(self) -> None:
        with self._lock:
            while self._compiled:
                self._compiled.popitem()[1].close()


def _key(sampling: Sampling, context_tokens: int | None) -> tuple[object, ...]:
    return sampling.json_schema, sampling.grammar, context_tokens


class _Guidance:
    """llguidance's view of one vocabulary."""

    def __init__(self, vocab: Vocab) -> None:
        self._ffi = vocab.library.ffi
        self._lib = vocab.library.lib
        self._tokenise = _tokenise_callback(vocab)
        self._tokenizer = _tokenizer(vocab, self._tokenise)

    def compile(self, text: str) -> Any:
        """A matcher that the caller frees; it may hold an error."""
        init = self._ffi.new("uint64_t[64]")  # larger than any version's
        self._lib.llg_constraint_init_set_defaults(init, self._tokenizer)
        return self._lib.llg_new_matcher(init, b"lark", text.encode())

    def close(self) -> None:
        """Free the tokenizer; matchers keep what they need of it."""
        self._lib.llg_free_tokenizer(self._tokenizer)


_KEPT = 32
_CACHES: "WeakKeyDictionary[Vocab, _Cache]" = WeakKeyDictionary()
_GUIDANCE: "WeakKeyDictionary[Vocab, _Guidance]" = WeakKeyDictionary()
_CREATING_CACHE = threading.Lock()
_CREATING_GUIDANCE = threading.Lock()


def _cache(vocab: Vocab) -> _Cache:
    with _CREATING_CACHE:
        found = _CACHES.get(vocab)
        if found is None:
            found = _CACHES[vocab] = _Cache()
            vocab.at_close(found.close)
        return found


def _guidance(vocab: Vocab) -> _Guidance:
    """Created at the first schema: half a second for fifty thousand tokens."""
    with _CREATING_GUIDANCE:
        found = _GUIDANCE.get(vocab)
        if found is None:
            found = _GUIDANCE[vocab] = _Guidance(vocab)
            vocab.at_close(found.close)
        return found


def _tokenise_callback(vocab: Vocab) -> Any:
    ffi = vocab.library.ffi

    def tokenise(_data: Any, text: Any, size: int, tokens: Any, most: int) -> int:
        found = vocab.tokens_of(bytes(ffi.buffer(text, size)), parse_special=True, add_special=False)
        for place, token in enumerate(found[:most]):
            tokens[place] = token
        return len(found)

    return ffi.callback("size_t(const void *, const uint8_t *, size_t, uint32_t *, size_t)", tokenise, error=0)


def _tokenizer(vocab: Vocab, tokenise: Any) -> Any:
    """llguidance's view of the vocabulary: every token's bytes, with 0xFF before special ones."""
    library = vocab.library
    ffi = vocab.library.ffi
    pieces = [vocab.piece(token) or _marked(vocab.piece(token, special=True)) for token in range(vocab.n_tokens)]
    lengths = np.array([len(piece) for piece in pieces], np.uint32)
    init = ffi.new("struct llg_tokenizer_init *")
    text = b"".join(pieces)
    init.vocab_size = vocab.n_tokens
    init.tok_eos = vocab.end_of_turn
    init.token_lens = ffi.cast("uint32_t *", lengths.ctypes.data)
    init.token_bytes = ffi.from_buffer(text)
    init.tokenize_assumes_string = True
    init.tokenize_fn = tokenise
    error = ffi.new("char[1024]")
    made = library.lib.llg_new_tokenizer(init, error, 1024)
    if made == ffi.NULL:
        raise EngineError(f"llguidance does not take this vocabulary: {library.text(error)}")
    return made


def _marked(piece: bytes) -> bytes:
    return b"\xff" + piece if piece else b""
