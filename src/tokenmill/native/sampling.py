"""Draws tokens as llama-server does: its chain, its order, its defaults, so that the same seed gives the same tokens.

Each sequence has a sampler and a generator of its own: what runs beside it changes none of its draws.

    logits -> bias -> penalties -> top-k -> top-p -> min-p -> xtc -> temperature -> draw
                 a drawn token that the grammar refuses: all again, with the grammar first

What llama-server has besides (DRY, typical, top-n-sigma, dynamic temperature) is off by default there and not here at
all. A greedy choice with nothing else to do is one look for the largest logit. Where nothing but forbidden tokens comes
before top-k, the chain gets the k largest and no others: sorting a vocabulary of 160,000 for each of 200 sequences
takes longer than many a step of the model.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tokenmill.engine.engine import MOST_LOGPROBS, Sampling, TokenLogprob
from tokenmill.errors import NonFiniteLogits, RequestRefused
from tokenmill.native.constraints import Constraint
from tokenmill.native.context import Context, Logits
from tokenmill.native.defaults import Defaults
from tokenmill.native.grammar import grammar_of, is_constrained
from tokenmill.native.vocab import Vocab

RANDOM_SEED = 0xFFFFFFFF  # llama.cpp's word for a seed that it draws itself
_BLOCK = 256  # logits looked at together
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
MOST_PENALISED = 1 << 20  # tokens a penalty looks back


class _Scratch:
    """Room for one draw's candidates. All samplers of a vocabulary share it: only the thread that decodes draws."""

    def __init__(self, vocab: Vocab) -> None:
        self._candidates = np.zeros(vocab.n_tokens, _CANDIDATE)
        self._ids = np.arange(vocab.n_tokens, dtype=np.int32)
        self._id_field, self._logit_field = self._candidates["id"], self._candidates["logit"]
        self._array = vocab.library.ffi.new("llama_token_data_array *")
        self._data = vocab.library.ffi.cast("llama_token_data *", self._candidates.ctypes.data)

    def take(self, logits: Logits) -> Any:
        """Every token with its logit: as llama.cpp's array."""
        array = self._array
        self._id_field[:], self._logit_field[:] = self._ids, logits  # samplers sort them; p they write before they read
        array.data = self._data
        array.size = len(self._ids)
        array.selected = -1
        array.sorted = False
        return array

    def take_few(self, logits: Logits, best: NDArray[np.intp]) -> Any:
        """These tokens alone with their logits, the largest first: as llama.cpp's array."""
        array = self._array
        size = len(best)
        self._id_field[:size], self._logit_field[:size] = best, logits[best]
        array.data = self._data
        array.size = size
        array.selected = -1
        array.sorted = True
        return array


_SCRATCH: "WeakKeyDictionary[Vocab, _Scratch]" = WeakKeyDictionary()


def _scratch(vocab: Vocab) -> _Scratch:
    return _SCRATCH.get(vocab) or _SCRATCH.setdefault(vocab, _Scratch(vocab))


class Sampler:
    """Draws the tokens of one sequence. Penalties see `prompt` before the first one.

    `constraint`: the request's compiled grammar or schema, for this sampler alone; without it, it is compiled here.
    """

    def __init__(
        self,
        vocab: Vocab,
        sampling: Sampling,
        *,
        prompt: Sequence[int] = (),
        seed: int | None = None,
        ignore_eos: bool = False,
        constraint: Constraint | None = None,
    ) -> None:
        self._ffi = vocab.library.ffi
        self._lib = vocab.library.lib
        self._vocab = vocab
        wanted = resolve(sampling, vocab.defaults)
        self.seed = seed_of(sampling.seed if seed is None else seed)
        self._chain = None
        biases = _biases(vocab, sampling, ignore_eos)
        penalised = wanted.penalty_last_n > 0 and (
            wanted.repeat_penalty != 1 or wanted.frequency_penalty != 0 or wanted.presence_penalty != 0
        )
        if constraint is None and is_constrained(sampling):
            constraint = vocab.constraints.compile(grammar_of(sampling, None, vocab.token_of))
        self.constraint = constraint
        plain = wanted.temperature <= 0 and not penalised and constraint is None
        self.greedy = plain and not biases
        # Of tokens that are only forbidden, such as all ends, the likeliest of the others is the answer, too.
        forbids = plain and all(bias == -math.inf for _, bias in biases)
        self._forbidden = frozenset(token for token, _ in biases) if forbids else None
        only_forbids = not penalised and all(bias == -math.inf for _, bias in biases)
        self._few = wanted.top_k if only_forbids and wanted.top_k > 0 else None
        self._never = np.array([token for token, _ in biases], np.intp)
        if self.greedy:
            return
        self._chain = self._make_chain(wanted, biases, penalised)
        if penalised:
            for token in prompt[-wanted.penalty_last_n :]:
                self._lib.llama_sampler_accept(self._chain, token)
        self._scratch = _scratch(vocab)

    def sample(self, context: Context, row: int) -> int:
        """Draw the token after a row of the last batch, and remember it."""
        return self.choose(context.logits(row))

    def choose(self, logits: Logits) -> int:
        """Draw a token by these logits and remember it; NonFiniteLogits where one of them is NaN or +inf."""
        likeliest = _finite_argmax(logits)
        if self._forbidden is not None and likeliest not in self._forbidden:
            return likeliest
        constraint = self.constraint
        token = self._draw(logits)
        if constraint is not None:
            if token is None or not constraint.allows(token):
                token = self._draw(constraint.apply(logits))
                if token is None:
                    raise RequestRefused(
                        "the grammar allows none of the model's tokens here",
                        hint="check that the grammar can end, and that its characters are in the vocabulary",
                    )
            constraint.accept(token)
        if token is None:
            raise RequestRefused("no token is left to draw", hint="check logit_bias")
        self._lib.llama_sampler_accept(self._chain, token)
        return token

    def logprobs(self, context: Context, row: int, token: int, n: int) -> TokenLogprob:
        """A token's logarithmic probability before any sampler touched it, with the n likeliest, best first."""
        logprob, best = logprobs(context.logits(row), token, n)
        return self._told(token, logprob, tuple(self._told(*one) for one in best))

    def _told(self, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        raw = self._vocab.piece(token, special=True)
        return TokenLogprob(raw.decode(errors="replace"), token, logprob, raw, top)

    def close(self) -> None:
        """Free what llama.cpp holds."""
        if self._chain is not None:
            self._lib.llama_sampler_free(self._chain)
            self._chain = None
        self.constraint = None

    def _draw(self, logits: Logits) -> int | None:
        """A token of the chain's choice; None where all have been ruled out."""
        few = self._likeliest(logits)
        array = self._scratch.take(logits) if few is None else self._scratch.take_few(logits, few)
        self._lib.llama_sampler_apply(self._chain, array)
        if not 0 <= array.selected < array.size:
            return None
        chosen = array.data[array.selected]
        return None if chosen.logit == -math.inf else int(chosen.id)

    def _likeliest(self, logits: Logits) -> NDArray[np.intp] | None:
        """What top-k leaves, largest first; None where the chain must see all tokens, or nothing is gained."""
        if self._few is None:
            return None
        wanted = self._few + len(self._never)
        if wanted * _BLOCK > len(logits):
            return None
        found = largest(logits, wanted)
        if len(self._never):
            found = found[~np.isin(found, self._never)]
        return found[: self._few] if len(found) else None

    def _make_chain(self, wanted: Defaults, biases: Sequence[tuple[int, float]], penalised: bool) -> Any:
        lib = self._lib
        size = self._vocab.n_tokens
        params = lib.llama_sampler_chain_default_params()
        params.no_perf = True
        chain = lib.llama_sampler_chain_init(params)

        def add(sampler: Any) -> None:
            lib.llama_sampler_chain_add(chain, sampler)

        if biases:
            add(lib.llama_sampler_init_logit_bias(size, len(biases), self._ffi.new("llama_logit_bias[]", biases)))
        if penalised:
            add(
                lib.llama_sampler_init_penalties(
                    size,
                    wanted.penalty_last_n,
                    wanted.repeat_penalty,
                    wanted.frequency_penalty,
                    wanted.presence_penalty,
                )
            )
        add(lib.llama_sampler_init_top_k(wanted.top_k))
        add(lib.llama_sampler_init_top_p(wanted.top_p, 0))
        add(lib.llama_sampler_init_min_p(wanted.min_p, 0))
        if wanted.xtc_probability > 0:
            add(lib.llama_sampler_init_xtc(wanted.xtc_probability, wanted.xtc_threshold, 0, self.seed))
        add(lib.llama_sampler_init_temp_ext(wanted.temperature, 0.0, 1.0))
        add(lib.llama_sampler_init_greedy() if wanted.temperature <= 0 else lib.llama_sampler_init_dist(self.seed))
        return chain


def _finite_argmax(logits: Logits) -> int:
    """The place of the largest logit. argmax returns the first NaN where there is one, so one look checks the row."""
    place = int(logits.argmax())
    value = float(logits[place])
    if not math.isfinite(value):
        raise NonFiniteLogits(
            f"the model computed {value} as the logit of token {place}",
            hint="check the file with `tokenmill models verify`, and the memory of the machine and its GPUs",
        )
    return place


def logprobs(logits: Logits, token: int, n: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """A token's logarithmic probability, and the n likeliest tokens with theirs, best first."""
    most = float(logits.max())
    norm = most + math.log(float(np.exp(logits - most, dtype=np.float32).sum(dtype=np.float64)))
    best = largest(logits, min(n, MOST_LOGPROBS, len(logits)))
    return float(logits[token]) - norm, tuple((int(one), float(logits[one]) - norm) for one in best)


def largest(logits: Logits, n: int) -> NDArray[np.intp]:
    """Places of the n largest, largest first; of equal ones the first.

    The n-th largest of the blocks' largest is a floor under all of them, and few others stand on it. A block is every
    so-manieth logit, so that the largest of all blocks are found side by side.
    """
    if n <= 0:
        return np.empty(0, np.intp)
    width = len(logits) // _BLOCK
    if width < n:
        return np.argsort(-logits, kind="stable")[:n]
    blocks = logits[: width * _BLOCK].reshape(_BLOCK, width)
    tops = blocks.max(axis=0)
    floor = np.partition(tops, -n)[-n]
    high = np.flatnonzero(tops >= floor)
    place, block = np.nonzero(blocks[:, high] >= floor)
    beyond = np.flatnonzero(logits[width * _BLOCK :] >= floor) + width * _BLOCK
    found = np.concatenate((place * width + high[block], beyond))  # ascending: nonzero goes row by row
    return found[np.argsort(-logits[found], kind="stable")[:n]]


def seed_of(seed: int | None) -> int:
    """32 bits, as llama-server takes them; drawn here where it would draw, so that it can be told."""
    wanted = RANDOM_SEED if seed is None else seed & RANDOM_SEED
    return secrets.randbelow(RANDOM_SEED) if wanted == RANDOM_SEED else wanted


def resolve(sampling: Sampling, defaults: Defaults) -> Defaults:
    """A request's values over the defaults; RequestRefused for what no sampler can use."""
    given = {name: value for name in _RANGES if (value := getattr(sampling, name)) is not None}
    for name, value in given.items():
        least, most = _RANGES[name]
        if not (isinstance(value, (int, float)) and math.isfinite(value) and least <= value <= most):
            raise RequestRefused(f"{name} is {value}", hint=f"it may be {least} to {most}")
    if given.get("repeat_penalty") == 0:
        raise RequestRefused("repeat_penalty is 0", hint="1 means none; it must be more than 0")
    if sampling.top_logprobs is not None and not 0 <= sampling.top_logprobs <= MOST_LOGPROBS:
        raise RequestRefused(f"top_logprobs is {sampling.top_logprobs}", hint=f"it may be 0 to {MOST_LOGPROBS}")
    return replace(defaults, **given)


_LARGE = 1e9
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, _LARGE),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repeat_penalty": (0.0, _LARGE),
    "presence_penalty": (-_LARGE, _LARGE),
    "frequency_penalty": (-_LARGE, _LARGE),
    "penalty_last_n": (0, MOST_PENALISED),
}


def _biases(vocab: Vocab, sampling: Sampling, ignore_eos: bool) -> list[tuple[int, float]]:
    """Additions to logits: the request's, the end tokens' where they are ignored, and what the makers never want."""
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocab.n_tokens:
            raise RequestRefused(
                f"logit_bias names token {token}", hint=f"the model has tokens 0 to {vocab.n_tokens - 1}"
            )
        if math.isnan(bias) or bias == math.inf:
            raise RequestRefused(f"logit_bias of token {token} is {bias}", hint="a number, or -inf to ban the token")
    ends = [(token, -math.inf) for token in sorted(vocab.ends)] if ignore_eos else []
    return [*sampling.logit_bias, *ends, *((token, -math.inf) for token in vocab.suppressed)]
