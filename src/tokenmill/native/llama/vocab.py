"""Text to tokens and back, with a model's own vocabulary.

llama.cpp's tokenizer is const and says of itself that it is thread-safe: a vocabulary may be used by one thread while
another decodes. It cuts text at special tokens first and works on each part between them alone, so parts that come
again and again (a digest in a thousand prompts) are looked up instead:

    <|im_start|> system\\n40 KB of digest <|im_end|> \\n <|im_start|> user\\nquestion <|im_end|> ...
      a token      found in the cache      a token        a token     tokenized      a token

Where parts are not independent (other kinds of vocabulary, special tokens that swallow spaces around them, special
tokens that overlap in the text), the whole text goes to llama.cpp. A text with special tokens that are not to be parsed
(`breaks`) is always cut.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from tokenmill.errors import EngineError, RequestRefused
from tokenmill.native.constraints.constraints import ConstraintTokenizer, TokenTable
from tokenmill.native.defaults import defaults_of
from tokenmill.native.llama.library import Library, metadata
from tokenmill.native.llama.log import LlamaLog
from tokenmill.units import MIB

SPM = 1
BPE = 2
# Kinds whose parts between special tokens are tokenized each by itself, read in llama_vocab::impl::tokenize.
_INDEPENDENT = frozenset({SPM, BPE})
_UNKNOWN = 1 << 0
_CONTROL = 1 << 3
_USER_DEFINED = 1 << 4
_LEFT = 1 << 7
_RIGHT = 1 << 8
_SWALLOWS = _LEFT | _RIGHT  # spaces left or right of it
CACHE_BYTES = 64 * MIB
LEAST_CACHED_BYTES = 256  # shorter parts are tokenized faster than they are worth keeping


class Vocab:
    """A model's vocabulary; lives as long as its model."""

    def __init__(self, library: Library, model: Any, log: LlamaLog, *, cache_bytes: int = CACHE_BYTES) -> None:
        self.library = library
        self.log = log
        self._ffi = library.ffi
        self._lib = library.lib
        self._pointer = library.lib.llama_model_get_vocab(model)
        self.kind = int(self._lib.llama_vocab_type(self._pointer))
        self.n_tokens = int(self._lib.llama_vocab_n_tokens(self._pointer))
        self.adds_bos = bool(self._lib.llama_vocab_get_add_bos(self._pointer))
        self.adds_eos = bool(self._lib.llama_vocab_get_add_eos(self._pointer))
        self.bos, self.eos = (
            None if token < 0 else int(token)
            for token in (self._lib.llama_vocab_bos(self._pointer), self._lib.llama_vocab_eos(self._pointer))
        )
        self.defaults = defaults_of(lambda key: metadata(library, model, key))
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self._cache = _Parts(cache_bytes)

    @property
    def pointer(self) -> Any:
        """llama.cpp's own handle."""
        if self._pointer is None:
            raise EngineError("the vocabulary's model is no longer loaded")
        return self._pointer

    def close(self) -> None:
        """Drop the handle before the model is freed."""
        self._pointer = None

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(token for token in range(self.n_tokens) if self._lib.llama_vocab_is_eog(self.pointer, token))

    @property
    def end_of_turn(self) -> int:
        """The token that ends an answer in a conversation; 0 where the vocabulary has none."""
        found = int(self._lib.llama_vocab_eot(self.pointer))
        return found if found >= 0 else self.eos or 0

    def warm(self) -> None:
        """Fill the caches that the first requests would wait for, which takes up to 0.5 s for large vocabularies."""
        _ = self.ends, self._specials, self.suppressed

    def is_end(self, token: int) -> bool:
        """Whether a token ends an answer."""
        return token in self.ends

    @cached_property
    def bos_text(self) -> str:
        """The beginning-of-sequence token as text; empty if the vocabulary has no such token."""
        return "" if self.bos is None else self.library.text(self._lib.llama_vocab_get_text(self.pointer, self.bos))

    @cached_property
    def eos_text(self) -> str:
        """The end-of-sequence token as text; empty if the vocabulary has no such token."""
        return "" if self.eos is None else self.library.text(self._lib.llama_vocab_get_text(self.pointer, self.eos))

    @cached_property
    def suppressed(self) -> tuple[int, ...]:
        """Tokens that must never be sampled, from the model's metadata."""
        count = self._ffi.new("int32_t *")
        found = self._lib.llama_vocab_get_suppress_tokens(self.pointer, count)
        return tuple(self._ffi.unpack(found, count[0])) if count[0] > 0 else ()

    @cached_property
    def token_table(self) -> TokenTable:
        """The tokens' bytes for llguidance."""
        pieces = tuple(self.piece(token) or _marked(self.piece(token, special=True)) for token in range(self.n_tokens))
        return TokenTable(pieces, (self.end_of_turn, *sorted(self.ends - {self.end_of_turn})))

    @cached_property
    def constraints(self) -> ConstraintTokenizer:
        """Compiles grammars for this vocabulary; slow to create."""
        return ConstraintTokenizer(
            self.token_table, lambda text: self.tokens_of(text, parse_special=False, add_special=False)
        )

    def token_of(self, text: str) -> int | None:
        """The token with this text, such as `<think>`; None where the text is not exactly one token."""
        found = self.tokens_of(text.encode(), parse_special=True, add_special=False)
        return found[0] if len(found) == 1 else None

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return a token's bytes, which may be part of a character; empty for control tokens unless `special`."""
        found = self._pieces.get((token, special))
        if found is None:
            found = self._pieces[token, special] = self._piece(token, special)
        return found

    def _piece(self, token: int, special: bool) -> bytes:
        if not 0 <= token < self.n_tokens:
            raise RequestRefused(
                f"{token} is not a token of this model", hint=f"it has tokens 0 to {self.n_tokens - 1}"
            )
        size = 64
        while True:
            text = self._ffi.new("char[]", size)
            length = int(self._lib.llama_token_to_piece(self.pointer, token, text, size, 0, special))
            if length >= 0:
                return bytes(self._ffi.buffer(text, length))
            size = -length

    @property
    def cached_bytes(self) -> int:
        """Approximate memory of the cached text parts."""
        return self._cache.held

    def tokenize(
        self, text: str, *, parse_special: bool = True, add_special: bool = True, breaks: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Tokens of a text; `add_special` puts the BOS and EOS around it that the model asks for.

        `breaks`: positions that no parsed special token may span, ascending.
        """
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise RequestRefused("the text holds half of a surrogate pair", hint="send valid UTF-8") from error
        if parse_special and breaks:
            parts: list[bytes | int] | None = self._cut_at(text, breaks)
            parse_special = False
        else:
            parts = self._cut(raw, parse_special) if len(raw) >= LEAST_CACHED_BYTES else None
        if parts is None:
            return self.tokens_of(raw, parse_special=parse_special, add_special=add_special)
        tokens: list[int] = []
        if add_special and self.adds_bos and self.bos is not None:
            tokens.append(self.bos)
        for part in parts:
            if isinstance(part, int):
                tokens.append(part)
            else:
                tokens.extend(self._part(part, parse_special))
        if add_special and self.adds_eos and self.eos is not None:
            tokens.append(self.eos)
        return tuple(tokens)

    def _part(self, part: bytes, parse_special: bool) -> Sequence[int]:
        if len(part) < LEAST_CACHED_BYTES:
            return self.tokens_of(part, parse_special=parse_special, add_special=False)
        found = self._cache.get(part)
        if found is None:
            found = self.tokens_of(part, parse_special=parse_special, add_special=False)
            self._cache.put(part, found)
        return found

    def tokens_of(self, raw: bytes, *, parse_special: bool, add_special: bool) -> tuple[int, ...]:
        """Tokens of these bytes, straight from llama.cpp."""
        if self.kind == 0:
            raise EngineError("the model has no vocabulary", hint="send tokens instead of text")
        most = len(raw) + 16  # a token is a byte at least
        tokens = self._ffi.new("int32_t[]", most)
        count = int(self._lib.llama_tokenize(self.pointer, raw, len(raw), tokens, most, add_special, parse_special))
        if count < 0 and count != -(1 << 31):  # a normalizer made the text longer
            most = -count
            tokens = self._ffi.new("int32_t[]", most)
            count = int(self._lib.llama_tokenize(self.pointer, raw, len(raw), tokens, most, add_special, parse_special))
        if count < 0:
            raise RequestRefused(f"a text of {len(raw)} bytes is too long for llama.cpp's tokenizer")
        return tuple(self._ffi.unpack(tokens, count))

    def _cut(self, raw: bytes, parse_special: bool) -> list[bytes | int] | None:
        """The text between special tokens and those tokens; None where parts cannot be told from the whole."""
        specials = self._specials[parse_special]
        return specials.cut(raw) if specials.independent else None

    def _cut_at(self, text: str, breaks: Sequence[int]) -> list[bytes | int]:
        """The text between special tokens that span no break, and those tokens."""
        specials = self._specials[True]
        parts: list[bytes | int] = []
        pending: list[bytes] = []  # of one part, which continues over breaks
        for start, end in pairwise((0, *breaks, len(text))):
            for part in specials.cut(text[start:end].encode(), whole=False) or ():
                if isinstance(part, bytes):
                    pending.append(part)
                else:
                    parts += (b"".join(pending), part)
                    pending = []
        return specials.swallowed([*parts, b"".join(pending)])

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The texts that are parsed as control tokens and as the unknown token."""
        specials = self._specials
        texts = specials[True].tokens.keys() - specials[False].tokens.keys()
        return tuple(sorted(text.decode(errors="ignore") for text in texts))

    @cached_property
    def _specials(self) -> "dict[bool, _Specials]":
        """By `parse_special`: what is cut out of a text first."""
        independent = self.kind in _INDEPENDENT
        every: dict[bool, dict[bytes, int]] = {True: {}, False: {}}
        swallowing: dict[int, int] = {}
        for token in range(self.n_tokens if self.kind else 0):
            attributes = int(self._lib.llama_vocab_get_attr(self.pointer, token))
            if not attributes & (_CONTROL | _USER_DEFINED | _UNKNOWN):
                continue
            text = bytes(self._ffi.string(self._lib.llama_vocab_get_text(self.pointer, token)))
            if attributes & _SWALLOWS:
                swallowing[token] = attributes
            independent = independent and not attributes & _SWALLOWS and bool(text) and text not in every[True]
            if not text:
                continue
            every[True][text] = token
            if not attributes & (_CONTROL | _UNKNOWN):
                every[False][text] = token
        return {parse: _Specials(_any_of(found), found, independent, swallowing) for parse, found in every.items()}


def _marked(piece: bytes) -> bytes:
    return b"\xff" + piece if piece else b""


@dataclass(frozen=True, slots=True)
class _Specials:
    pattern: re.Pattern[bytes] | None
    tokens: dict[bytes, int]
    independent: bool  # parts between them have the tokens that they have in the whole text
    swallowing: dict[int, int]  # tokens with the spaces next to them, by _SWALLOWS

    def cut(self, raw: bytes, *, whole: bool = True) -> list[bytes | int] | None:
        """The text between special tokens, and those tokens.

        None if tokens overlap, which llama.cpp decides; the first one counts unless the text is `whole`.
        """
        if self.pattern is None:
            return [raw]
        parts: list[bytes | int] = []
        end = 0
        for match in self.pattern.finditer(raw):
            start = match.start(1)
            text = match[1]
            if start < end:
                if start + len(text) <= end or not whole:
                    continue  # inside a longer one, which llama.cpp looks for first
                return None
            if start > end:
                parts.append(raw[end:start])
            parts.append(self.tokens[text])
            end = start + len(text)
        if end < len(raw):
            parts.append(raw[end:])
        return parts

    def swallowed(self, parts: list[bytes | int]) -> list[bytes | int]:
        """The parts without the spaces that tokens next to them swallow, and without empty ones."""
        found: list[bytes | int] = []
        for index, part in enumerate(parts):
            if isinstance(part, bytes):
                if index and self._swallows(parts[index - 1], _RIGHT):
                    part = part.lstrip()  # noqa: PLW2901
                if index + 1 < len(parts) and self._swallows(parts[index + 1], _LEFT):
                    part = part.rstrip()  # noqa: PLW2901
            if part != b"":
                found.append(part)
        return found

    def _swallows(self, neighbour: bytes | int, side: int) -> bool:
        return isinstance(neighbour, int) and bool(self.swallowing.get(neighbour, 0) & side)


def _any_of(texts: dict[bytes, int]) -> re.Pattern[bytes] | None:
    """A pattern for the texts, the longest first; where one may begin inside another, it finds every beginning."""
    if not texts:
        return None
    any_of = b"(" + b"|".join(map(re.escape, sorted(texts, key=len, reverse=True))) + b")"
    beginnings = {text[:length] for text in texts for length in range(1, len(text))}
    overlap = any(text[-length:] in beginnings for text in texts for length in range(1, len(text)))
    return re.compile(b"(?=" + any_of + b")" if overlap else any_of)


class _Parts:
    """Tokens of parts of texts, the least recently used dropped; any thread may use it."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self.held = 0
        self._parts: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, part: bytes) -> tuple[int, ...] | None:
        with self._lock:
            found = self._parts.get(part)
            if found is not None:
                self._parts.move_to_end(part)
            return found

    def put(self, part: bytes, tokens: tuple[int, ...]) -> None:
        cost = _cost(part, tokens)
        if cost > self._most:
            return
        with self._lock:
            before = self._parts.pop(part, None)
            if before is not None:
                self.held -= _cost(part, before)
            self._parts[part] = tokens
            self.held += cost
            while self.held > self._most:
                gone, of = self._parts.popitem(last=False)
                self.held -= _cost(gone, of)


def _cost(part: bytes, tokens: tuple[int, ...]) -> int:
    return len(part) + 40 * len(tokens) + 200  # a tuple's place and, for most of them, an int of its own
