"""Says in words what a token's time is spent on, and so what to buy next."""

import re

from tokenmill.planner.plan import Speed

_KINDS = (
    (r"pcie", "copying experts over PCIe", "a wider PCIe link, or GPU memory that holds them"),
    (r"(dram|pmem|disk) ", "reading weights and cache from host memory", "GPU memory, or faster host memory"),
    (r"processors", "the processors' arithmetic", "more or newer cores, or GPU memory for what they compute"),
    (r"gpu\d+ (weights|experts|attention)", "the GPUs' own work", "a faster GPU, or a second for a larger share"),
    (r"", "hops, launches and other fixed costs", "fewer GPUs with more memory each"),
)
"""(start of a term's name, what that is, what makes it less)."""


def to_buy(name: str, speed: Speed) -> str | None:
    """The largest kind of cost and what would lower it; None where nothing was forecast."""
    total = sum(term.seconds for term in speed.terms)
    if total <= 0:
        return None
    shares = dict.fromkeys(_KINDS, 0.0)
    for term in speed.terms:
        kind = next(kind for kind in _KINDS if re.match(kind[0], term.name))
        shares[kind] += term.seconds / total
    (_, what, remedy), share = max(shares.items(), key=lambda item: item[1])
    return f"{share:.0%} of {name} is {what}: what helps most is {remedy}"
