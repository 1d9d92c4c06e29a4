"""Draws tokens with llama-server's samplers, order and defaults, so that the same seed gives the same tokens.

    logits -> bias -> penalties -> top-k -> top-p -> min-p -> xtc -> temperature -> draw
                 if the constraint forbids the token: again, with its mask applied to the logits first

Each sequence has its own sampler and random generator: other sequences do not change its draws. DRY, typical,
top-n-sigma and dynamic temperature, which are off by default in llama-server, do not exist here. Sorting the whole
vocabulary would take longer than many a step of the model, so a greedy draw is one argmax, and the chain gets only the
k largest logits unless biases or penalties could change which these are.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tokenmill.engine.engine import MAX_LOGPROBS, Sampling, TokenLogprob
from tokenmill.errors import NonFiniteLogits, RequestRefused
from tokenmill.native.constraints.constraints import Constraint
from tokenmill.native.constraints.grammar import grammar_of, is_constrained
from tokenmill.native.defaults import Defaults
from tokenmill.native.llama.context import LlamaContext, Logits
from tokenmill.native.llama.vocab import Vocab
from tokenmill.native.sampling.logprobs import is_quick, largest, logprobs
from tokenmill.native.sampling.row_scan import Largest

RANDOM_SEED = 0xFFFFFFFF  # llama.cpp draws a seed itself
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
MOST_PENALISED = 1 << 20  # tokens that a penalty may look back


class _Scratch:
    """Buffers for one draw, shared by all samplers of a vocabulary: only the decoding thread draws."""

    def __init__(self, vocab: Vocab) -> None:
        self._candidates = np.zeros(vocab.n_tokens, _CANDIDATE)
        self._ids = np.arange(vocab.n_tokens, dtype=np.int32)
        self._id_field, self._logit_field = self._candidates["id"], self._candidates["logit"]
        self._array = vocab.library.ffi.new("llama_token_data_array *")
        self._data = vocab.library.ffi.cast("llama_token_data *", self._candidates.ctypes.data)

    def take(self, logits: Logits) -> Any:
        """Every token with its logit, as llama.cpp's array."""
        array = self._array
        self._id_field[:], self._logit_field[:] = self._ids, logits  # samplers reorder both
        array.data = self._data
        array.size = len(self._ids)
        array.selected = -1
        array.sorted = False
        return array

    def take_few(self, logits: Logits, best: NDArray[np.intp]) -> Any:
        """Only these tokens with their logits, the largest first, as llama.cpp's array."""
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
        only_bans = all(bias == -math.inf for _, bias in biases)
        # A greedy draw is the largest logit, unless that token is banned.
        self._banned = frozenset(token for token, _ in biases) if plain and only_bans else None
        self._top_k = wanted.top_k if only_bans and not penalised and wanted.top_k > 0 else None
        self._biased = np.array([token for token, _ in biases], np.intp)
        self._candidates = 0 if self._top_k is None else self._top_k + len(biases)
        # How many of the largest logits `choose` can use; 0: it needs the whole row.
        self.wanted_largest = 1 if self._banned is not None else self._candidates
        if self.greedy:
            return
        self._chain = self._make_chain(wanted, biases, penalised)
        if penalised:
            for token in prompt[-wanted.penalty_last_n :]:
                self._lib.llama_sampler_accept(self._chain, token)
        self._scratch = _scratch(vocab)

    def sample(self, context: LlamaContext, row: int, largest: Largest | None = None) -> int:
        """Draw the token that follows a row of the last batch, as `choose`."""
        return self.choose(context.logits(row), largest)

    def choose(self, logits: Logits, largest: Largest | None = None) -> int:
        """Draw a token and advance the constraint and the penalties by it.

        `largest`: the `wanted_largest` largest logits of the row, if they are known.
        NonFiniteLogits if a logit is NaN or +inf; RequestRefused if the constraint or the biases leave no token.
        """
        if largest is None or not math.isfinite(largest.top):
            likeliest = _finite_argmax(logits)
        else:
            likeliest = int(largest.tokens[0])
        if self._banned is not None and likeliest not in self._banned:
            return likeliest
        constraint = self.constraint
        token = self._draw(logits, largest)
        if constraint is not None:
            if token is None or not constraint.allows(token):
                token = self._draw(constraint.apply(logits))
                if token is None:
                    raise RequestRefused(
                        "the grammar allows none of the model's tokens here",
                        hint="check that the grammar can end and that logit_bias does not ban its tokens",
                    )
            constraint.accept(token)
        if token is None:
            raise RequestRefused("logit_bias leaves no token", hint="ban fewer tokens")
        self._lib.llama_sampler_accept(self._chain, token)
        return token

    def logprobs(self, context: LlamaContext, row: int, token: int, n: int) -> TokenLogprob:
        """A token's log-probability before any sampler or mask, with the n likeliest tokens, best first."""
        logprob, best = logprobs(context.logits(row), token, n)
        return self._logprob(token, logprob, tuple(self._logprob(*one) for one in best))

    def _logprob(self, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        raw = self._vocab.piece(token, special=True)
        return TokenLogprob(raw.decode(errors="replace"), token, logprob, raw, top)

    def close(self) -> None:
        """Free llama.cpp's samplers; further calls do nothing."""
        if self._chain is not None:
            self._lib.llama_sampler_free(self._chain)
            self._chain = None
        self.constraint = None

    def _draw(self, logits: Logits, largest: Largest | None = None) -> int | None:
        """The token that the chain chooses; None if every logit is -inf."""
        few = self._likeliest(logits, largest)
        array = self._scratch.take(logits) if few is None else self._scratch.take_few(logits, few)
        self._lib.llama_sampler_apply(self._chain, array)
        if not 0 <= array.selected < array.size:
            return None
        chosen = array.data[array.selected]
        return None if chosen.logit == -math.inf else int(chosen.id)

    def _likeliest(self, logits: Logits, known: Largest | None) -> NDArray[np.intp] | None:
        """The result of top-k, largest first; None if the chain must see all tokens or sorting is as fast."""
        if self._top_k is None:
            return None
        if known is not None and len(known.tokens) == self._candidates:
            found = known.tokens
        elif is_quick(logits, self._candidates):
            found = largest(logits, self._candidates)
        else:
            return None
        if len(self._biased):
            found = found[~np.isin(found, self._biased)]
        return found[: self._top_k] if len(found) else None

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
    """Index of the largest logit; argmax returns the first NaN, so that this also checks the whole row."""
    index = int(logits.argmax())
    value = float(logits[index])
    if not math.isfinite(value):
        raise NonFiniteLogits(
            f"the model computed {value} as the logit of token {index}",
            hint="check the file with `tokenmill models verify`, and the memory of the machine and its GPUs",
        )
    return index


def seed_of(seed: int | None) -> int:
    """The lower 32 bits, as in llama-server; a random seed is drawn here, so that it can be reported."""
    wanted = RANDOM_SEED if seed is None else seed & RANDOM_SEED
    return secrets.randbelow(RANDOM_SEED) if wanted == RANDOM_SEED else wanted


def resolve(sampling: Sampling, defaults: Defaults) -> Defaults:
    """The defaults with the request's values; RequestRefused for a value out of range."""
    given = {name: value for name in _RANGES if (value := getattr(sampling, name)) is not None}
    for name, value in given.items():
        least, most = _RANGES[name]
        if not (isinstance(value, (int, float)) and math.isfinite(value) and least <= value <= most):
            raise RequestRefused(f"{name} must be {least} to {most} (got {value})", hint=f"change or omit {name}")
    if given.get("repeat_penalty") == 0:
        raise RequestRefused("repeat_penalty must be above 0 (got 0)", hint="1 is no penalty")
    if sampling.top_logprobs is not None and not 0 <= sampling.top_logprobs <= MAX_LOGPROBS:
        raise RequestRefused(
            f"top_logprobs must be 0 to {MAX_LOGPROBS} (got {sampling.top_logprobs})", hint="ask for fewer"
        )
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
    """Additions to logits: the request's, and -inf for ignored end tokens and those that the model file suppresses."""
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocab.n_tokens:
            raise RequestRefused(
                f"logit_bias names token {token}", hint=f"the model has tokens 0 to {vocab.n_tokens - 1}"
            )
        if math.isnan(bias) or bias == math.inf:
            raise RequestRefused(f"logit_bias of token {token} is {bias}", hint="a number, or -inf to ban the token")
    ends = [(token, -math.inf) for token in sorted(vocab.ends)] if ignore_eos else []
    return [*sampling.logit_bias, *ends, *((token, -math.inf) for token in vocab.suppressed)]
