"""A short name for where a model's weights are, by which measurements of one placement are told from another's.

    experts dram 80% gpu0 20%, rest gpu0

Shares are of the experts' bytes and of all others', to a tenth: a layer more or less runs alike. What looks up rows
(embeddings) or is not used in decoding does not count.
"""

import re
from collections import Counter

from tokenmill.model.profile import Profile, TensorClass
from tokenmill.planner.plan import Placement

UNKNOWN = "plan"
"""Processors alone; and what files have from before placements had names, of which nobody knows where weights were."""

STEP = 10  # percent
_IDLE = (TensorClass.EMBEDDING, TensorClass.MTP)


def fingerprint(profile: Profile, placement: Placement) -> str:
    """Equal for placements that are alike; `UNKNOWN` where no GPU is used."""
    if not placement.gpus:
        return UNKNOWN
    sums: dict[str, Counter[str]] = {"experts": Counter(), "rest": Counter()}
    for tensor, home in zip(profile.tensors, placement.homes, strict=True):
        if tensor.cls not in _IDLE:
            sums["experts" if tensor.cls is TensorClass.ROUTED_EXPERTS else "rest"][home] += tensor.bytes
    return ", ".join(f"{kind} {_shares(found)}" for kind, found in sums.items() if found)


def kinds(name: str) -> str:
    """A fingerprint without its shares: which memories hold anything, for comparing different models."""
    return re.sub(r" \d+%", "", name)


def _shares(found: Counter[str]) -> str:
    if len(found) == 1:
        return next(iter(found))
    total = found.total()
    return " ".join(f"{tier} {_rounded(found[tier] / total)}%" for tier in sorted(found))


def _rounded(share: float) -> int:
    """Some is never none, and all but some never all."""
    return min(100 - STEP, max(STEP, round(share * 100 / STEP) * STEP))
