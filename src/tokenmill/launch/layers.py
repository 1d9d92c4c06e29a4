"""llama.cpp's rule from -ngl and -ts to the device of every layer, and its inverse.

  entries   0 1 2 ... n-1 | n        layers, then the output
  -ngl g    the last g entries go to GPUs, the first ones stay on the CPU
  -ts a,b   the GPUs' entries are cut where i/g passes a/(a+b), compared in single precision

llama.cpp counts the output as the last entry (since December 2025); ik_llama.cpp counts only layers, and puts the
output on a GPU if g is larger than the number of layers.
"""

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.errors import NotSpellable
from tokenmill.model.profile import Profile
from tokenmill.planner.plan import Placement

ALL_LAYERS = 999  # the usual value for all layers; every version accepts it


@dataclass(frozen=True, slots=True)
class LayerFlags:
    """Values of -ngl and -ts, and the GPU of each position of -ts."""

    gpu_layers: int
    tensor_split: tuple[int, ...]  # one count per GPU; empty: one GPU or none
    gpus: tuple[str, ...]  # tiers in the order the engine must see them


def devices(
    layers: int, gpu_layers: int, split: Sequence[float], gpu_count: int, *, output_first: bool = True
) -> tuple[int | None, ...]:
    """The GPU (None: the CPU) of each layer and, last, of the output."""
    if gpu_count == 0 or gpu_layers <= 0:
        return (None,) * (layers + 1)
    start = max(layers + (1 if output_first else 0) - gpu_layers, 0)
    count = min(gpu_layers, layers + 1)
    cuts = _cuts(split, gpu_count)
    placed = [
        None if index < start else min(bisect_right(cuts, _single((index - start) / count)), gpu_count - 1)
        for index in range(layers + 1)
    ]
    if not output_first and gpu_layers <= layers:
        placed[layers] = None
    return tuple(placed)


def layer_flags(placement: Placement, profile: Profile, *, output_first: bool = True) -> LayerFlags:
    """The -ngl and -ts that assign every layer to its device; NotSpellable if there are none.

    The output needs an override if its device differs from the rule's.
    """
    gpus = gpu_order(placement)
    total = layer_count(profile)
    # multi-token-prediction layers come last and share the last layer's device
    wanted = [None if tier not in gpus else gpus.index(tier) for tier in placement.layers]
    wanted += wanted[-1:] * (total - len(wanted))
    first = next((index for index, gpu in enumerate(wanted) if gpu is not None), total)
    on_gpus = [gpu for gpu in wanted[first:] if gpu is not None]
    if len(on_gpus) != total - first or on_gpus != sorted(on_gpus):
        raise NotSpellable(
            "-ngl and -ts cannot express this plan: a GPU has two ranges of layers, or the CPU has layers after a GPU",
            hint="use one contiguous range of layers per GPU, after those of the CPU",
        )
    output_on_gpu = placement.head in gpus
    if not on_gpus:
        # only the output is on a GPU: one entry for llama.cpp, an override for ik_llama.cpp
        return LayerFlags(1 if output_on_gpu and output_first else 0, (), gpus)
    counts = [on_gpus.count(gpu) for gpu in range(len(gpus))]
    if output_first or first == 0:
        counts[on_gpus[-1]] += 1  # the output counts with the last layer
    gpu_layers = ALL_LAYERS if first == 0 else sum(counts)
    split = tuple(counts) if len(gpus) > 1 else ()
    if devices(total, gpu_layers, split, len(gpus), output_first=output_first)[:total] != tuple(wanted):
        raise NotSpellable("no -ts divides the layers as planned", hint="plan with fewer GPUs, or with --own-fit")
    return LayerFlags(gpu_layers, split, gpus)


def gpu_order(placement: Placement) -> tuple[str, ...]:
    """GPU tiers in the order of their layers, followed by those without layers, by index."""
    computing = dict.fromkeys(tier for tier in placement.layers if tier.startswith("gpu"))
    return (*computing, *(tier for tier in placement.gpus if tier not in computing))


def layer_count(profile: Profile) -> int:
    """Number of layers as llama.cpp counts them, multi-token-prediction layers included."""
    return max((tensor.layer + 1 for tensor in profile.tensors if tensor.layer is not None), default=profile.layers)


def _cuts(split: Sequence[float], gpu_count: int) -> list[float]:
    """The end of each GPU's share, between 0 and 1, in llama.cpp's float arithmetic."""
    shares = [_single(share) for share in (*split, *[0.0] * gpu_count)][:gpu_count]
    if not any(shares):
        shares = [1.0] * gpu_count
    total = 0.0
    sums = []
    for share in shares:
        total = _single(total + share)
        sums.append(total)
    return [_single(value / total) for value in sums]


def _single(value: float) -> float:
    """Round to single precision; double-precision sums and quotients of singles round to the same single."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
