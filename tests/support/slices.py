"""A few layers of a catalogue model with its real dimensions."""

from dataclasses import replace

from tokenmill.model import catalog
from tokenmill.model.describe import describe
from tokenmill.model.profile import Profile


def kimi_slice(layers: int = 5) -> Profile:
    """Kimi-K2.5 cut down to its dense layer and a few layers of experts: Q4_0 experts, Q8_0 for the rest."""
    whole = catalog.header("kimi-k2.5:Q4_X")
    kept = tuple(t for t in whole.tensors if not t.name.startswith("blk.") or int(t.name.split(".")[1]) < layers)
    return describe(
        (replace(whole, tensors=kept, keys=whole.keys | {"deepseek2.block_count": layers}),), format="catalog"
    )
