"""Sampling defaults: those of llama-server's pinned build, unless the model file has its own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Defaults:
    """The values in common/common.h of the pinned build."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1


# Keys of a GGUF file that override the defaults, as in llama-server.
_IN_FILE = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repeat_penalty": "general.sampling.penalty_repeat",
    "penalty_last_n": "general.sampling.penalty_last_n",
    "xtc_probability": "general.sampling.xtc_probability",
    "xtc_threshold": "general.sampling.xtc_threshold",
}


def defaults_of(metadata: Callable[[str], str | None]) -> Defaults:
    """llama-server's defaults for a model with this metadata."""
    found: dict[str, Any] = {}
    for name, key in _IN_FILE.items():
        text = metadata(key)
        if text is None:
            continue
        kind = type(getattr(Defaults(), name))
        try:
            found[name] = kind(float(text))
        except ValueError:
            continue  # llama.cpp keeps the default too
    return replace(Defaults(), **found)
