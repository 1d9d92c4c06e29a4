"""Token probabilities in OpenAI's two formats."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from tokenmill.engine.engine import TokenLogprob

_LOWEST_LOGPROB = -9999.0  # OpenAI's value for an impossible token, because JSON has no infinity


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Token probabilities in the format of chat completions."""
    return {
        "content": [_token(token) | {"top_logprobs": [_token(top) for top in token.top]} for token in tokens],
        "refusal": None,
    }


def _token(token: TokenLogprob) -> dict[str, Any]:
    entry: dict[str, Any] = {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.raw)}
    if token.token is not None:
        entry["id"] = token.token  # an extension of llama-server
    return entry


def text_logprobs(tokens: Sequence[TokenLogprob], offset: int = 0) -> dict[str, Any]:
    """Token probabilities in the format of text completions; `offset` is that of the first token in the text."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [{top.text: _finite(top.logprob) for top in token.top} for token in tokens],
        "text_offset": offsets,
    }


def _finite(logprob: float) -> float:
    return logprob if isfinite(logprob) else _LOWEST_LOGPROB
