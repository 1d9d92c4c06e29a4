"""What may come next in an answer that must follow a grammar (GBNF) or a JSON schema.

Grammars are followed by llama.cpp's own sampler. Schemas are followed by llguidance, as in llama-server: the wheel
holds it; where a libllama.so of one's own does not, they are followed as grammars of ours (schema_gbnf.py).
"""

import math
import threading
from collections import OrderedDict
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tokenmill.engine.engine import Sampling
from tokenmill.engine.native.abi import Library
from tokenmill.engine.native.grammar import check_size, grammar_of
from tokenmill.engine.native.running import standard_error
from tokenmill.engine.native.schema_gbnf import gbnf_of
from tokenmill.engine.native.vocab import Vocab
from tokenmill.errors import EngineError, RequestRefused

_PARSING = "error parsing grammar"  # how llama.cpp begins what it prints
CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Constraint(Protocol):
    """What the tokens of an answer must follow."""

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""

    def restrict(self, candidates: NDArray[Any], array: Any) -> None:
        """Make every token that may not come next impossible; candidates are in the order of their ids."""

    def accept(self, token: int) -> None:
        """Go on; only with a token that is allowed."""

    def close(self) -> None:
        """Free what C code holds."""


class Grammar:
    """A GBNF grammar."""

    def __init__(self, vocab: Vocab, text: str) -> None:
        check_size(text)
        if "\0" in text:
            raise RequestRefused("the grammar holds a NUL character")
        self._ffi, self._lib = vocab.library.ffi, vocab.library.lib
        mark = vocab.log.mark()
        with standard_error(_PARSING) as printed:
            self._sampler = self._lib.llama_sampler_init_grammar(vocab.pointer, text.encode(), b"root")
        if self._sampler == self._ffi.NULL:
            said = [line for line in printed().splitlines() if _PARSING in line]
            said += [line for line in vocab.log.since(mark) if line != "failed to parse grammar"]
            why = said[0].rpartition(f"{_PARSING}: ")[2] if said else "llama.cpp does not say why"
            raise RequestRefused(f"the grammar is not valid GBNF: {why[:300]}", hint="it needs a rule called root")
        self._one = self._ffi.new("llama_token_data *")
        self._array = self._ffi.new("llama_token_data_array *")

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""
        one, array = self._one, self._array
        one.id, one.logit, one.p = token, 1.0, 0.0
        array.data, array.size, array.selected, array.sorted = one, 1, -1, False
        self._lib.llama_sampler_apply(self._sampler, array)
        return float(one.logit) != -math.inf

    def restrict(self, candidates: NDArray[Any], array: Any) -> None:
        """Make every token that may not come next impossible."""
        self._lib.llama_sampler_apply(self._sampler, array)

    def accept(self, token: int) -> None:
        """Go on; a token that is not allowed would end the process."""
        self._lib.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        """Free the sampler."""
        self._lib.llama_sampler_free(self._sampler)


class Schema:
    """A JSON schema, in llguidance's form."""

    def __init__(self, vocab: Vocab, text: str) -> None:
        self._ffi, self._lib = vocab.library.ffi, vocab.library.lib
        self._size, self._ends = vocab.n_tokens, vocab.ends
        self._matcher = _guidance(vocab).matcher(text)
        self._mask: NDArray[np.bool_] | None = None

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""
        return bool(self._allowed()[token])

    def restrict(self, candidates: NDArray[Any], array: Any) -> None:
        """Make every token that may not come next impossible."""
        candidates["logit"][~self._allowed()] = -np.inf

    def accept(self, token: int) -> None:
        """Go on."""
        if token in self._ends:  # where nothing may follow, llguidance has ended already and takes not even that
            return
        self._mask = None
        if self._lib.llg_matcher_consume_token(self._matcher, token):
            raise EngineError(f"the JSON schema cannot be followed any further: {self._error()}")

    def close(self) -> None:
        """Free the matcher."""
        self._lib.llg_free_matcher(self._matcher)

    def _allowed(self) -> NDArray[np.bool_]:
        if self._mask is None:
            if self._lib.llg_matcher_compute_mask(self._matcher):
                raise EngineError(f"the JSON schema cannot be followed any further: {self._error()}")
            bits = self._ffi.buffer(
                self._lib.llg_matcher_get_mask(self._matcher), self._lib.llg_matcher_get_mask_byte_size(self._matcher)
            )
            packed = np.frombuffer(bits, np.uint8)
            self._mask = np.unpackbits(packed, count=self._size, bitorder="little").view(np.bool_)
        return self._mask

    def _error(self) -> str | None:
        return _matcher_error(self._ffi, self._lib, self._matcher)


def _matcher_error(ffi: Any, lib: Any, matcher: Any) -> str | None:
    found = lib.llg_matcher_get_error(matcher)
    if found == ffi.NULL:
        return None
    return bytes(ffi.string(found)).decode(errors="replace").partition("\n<state>")[0].strip()


def can_follow_schemas(library: Library) -> bool:
    """Whether the library holds llguidance."""
    return hasattr(library.lib, "llg_new_matcher")


def prepare(vocab: Vocab, sampling: Sampling) -> None:
    """Refuse what cannot be followed, and do the slow part of what can: for a thread that does not decode."""
    if sampling.json_schema is not None and can_follow_schemas(vocab.library):
        _guidance(vocab).check(grammar_of(sampling.json_schema))
    elif text := _gbnf(sampling):
        Grammar(vocab, text).close()


def constraint_of(vocab: Vocab, sampling: Sampling) -> Constraint | None:
    """What a request's tokens must follow."""
    if sampling.json_schema is not None and can_follow_schemas(vocab.library):
        return Schema(vocab, grammar_of(sampling.json_schema))
    text = _gbnf(sampling)
    return Grammar(vocab, text) if text else None


def _gbnf(sampling: Sampling) -> str | None:
    if sampling.json_schema is None:
        return sampling.grammar
    empty = "".join(sampling.json_schema.split()) == "{}"  # any object, as for llguidance
    return gbnf_of('{"type": "object"}' if empty else sampling.json_schema)


class _Guidance:
    """llguidance for one vocabulary: its view of the tokens, and the schemas it has seen, ready to be copied."""

    def __init__(self, vocab: Vocab) -> None:
        self._ffi, self._lib = vocab.library.ffi, vocab.library.lib
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, Any] = OrderedDict()
        self._tokenise = _tokenise_callback(vocab)
        self._tokenizer = _tokenizer(vocab, self._tokenise)

    def matcher(self, text: str) -> Any:
        """A matcher of a schema, at its beginning."""
        with self._lock:
            return self._lib.llg_clone_matcher(self._made(text))

    def check(self, text: str) -> None:
        """RequestRefused if a schema cannot be followed."""
        with self._lock:
            self._made(text)

    def _made(self, text: str) -> Any:
        found = self._seen.get(text)
        if found is not None:
            self._seen.move_to_end(text)
            return found
        init = self._ffi.new("uint64_t[64]")  # larger than any version's
        self._lib.llg_constraint_init_set_defaults(init, self._tokenizer)
        made = self._lib.llg_new_matcher(init, b"lark", text.encode())
        error = _matcher_error(self._ffi, self._lib, made)
        if error is not None:
            self._lib.llg_free_matcher(made)
            raise RequestRefused(f"the JSON schema cannot be followed: {error[:300]}")
        self._seen[text] = made
        if len(self._seen) > _KEPT_SCHEMAS:
            self._lib.llg_free_matcher(self._seen.popitem(last=False)[1])
        return made

    def close(self) -> None:
        """Free everything."""
        with self._lock:
            while self._seen:
                self._lib.llg_free_matcher(self._seen.popitem()[1])
            self._lib.llg_free_tokenizer(self._tokenizer)


_KEPT_SCHEMAS = 32
_GUIDANCE: "WeakKeyDictionary[Vocab, _Guidance]" = WeakKeyDictionary()
_MAKING = threading.Lock()


def _guidance(vocab: Vocab) -> _Guidance:
    """Made at the first schema: half a second for fifty thousand tokens."""
    with _MAKING:
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
    library, ffi = vocab.library, vocab.library.ffi
    pieces = [vocab.piece(token) or _marked(vocab.piece(token, special=True)) for token in range(vocab.n_tokens)]
    lengths = np.array([len(piece) for piece in pieces], np.uint32)
    init = ffi.new("struct llg_tokenizer_init *")
    text = b"".join(pieces)
    init.vocab_size, init.tok_eos = vocab.n_tokens, vocab.end_of_turn
    init.token_lens, init.token_bytes = ffi.cast("uint32_t *", lengths.ctypes.data), ffi.from_buffer(text)
    init.tokenize_assumes_string, init.tokenize_fn = True, tokenise
    error = ffi.new("char[1024]")
    made = library.lib.llg_new_tokenizer(init, error, 1024)
    if made == ffi.NULL:
        raise EngineError(f"llguidance does not take this vocabulary: {library.text(error)}")
    return made


def _marked(piece: bytes) -> bytes:
    return b"\xff" + piece if piece else b""
