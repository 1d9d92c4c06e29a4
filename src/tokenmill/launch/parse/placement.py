"""Computes the placement that a command line causes, by the engine's own rules."""

import re
from collections.abc import Sequence

from tokenmill.errors import UsageError
from tokenmill.launch.layers import ALL_LAYERS, devices, layer_count
from tokenmill.launch.parse.parsed import ReadCommand
from tokenmill.launch.tensor_patterns import HOST, resolve, rule_home
from tokenmill.model.profile import Profile, TensorClass
from tokenmill.planner.plan import Placement


def to_placement(
    read: ReadCommand, profile: Profile, gpu_count: int, *, free_bytes: Sequence[int] = (), host: str = HOST
) -> Placement:
    """The placement that results from -ngl, -ts, -ot and -ncmoe by llama.cpp's rules.

    Without -ts layers are split by free memory, evenly if `free_bytes` is empty. `host` is the host's tier.
    """
    if read.goal.own_fit and gpu_count:
        raise UsageError(
            "the command lets the engine place the layers",
            hint="plan with --own-fit, or add -ngl",
        )
    indices = read.goal.gpus if read.goal.gpus is not None else tuple(range(gpu_count))
    gpus = () if read.goal.cpu_only else tuple(f"gpu{index}" for index in indices[:gpu_count])
    total = layer_count(profile)
    rule = devices(
        total,
        ALL_LAYERS if read.gpu_layers is None else read.gpu_layers,
        read.tensor_split or free_bytes,
        len(gpus),
        output_first=not read.fork,
    )
    tiers = [host if gpu is None else gpus[gpu] for gpu in rule]
    named = [(regex, _tier(device, gpus, host)) for regex, device in read.overrides]
    homes = []
    for tensor in profile.tensors:
        by_rule = rule_home(tensor, tiers)
        homes.append(resolve(tensor.name, named) or (host if by_rule == HOST else by_rule))
    outputs = [
        home
        for tensor, home in zip(profile.tensors, homes, strict=True)
        if tensor.cls is TensorClass.OUTPUT and len(tensor.shape) > 1
    ]
    return Placement(tuple(homes), tuple(tiers[: profile.layers]), outputs[0] if outputs else tiers[-1])


def _tier(device: str, gpus: tuple[str, ...], host: str) -> str:
    if re.fullmatch(r"CPU|.*_Host", device):
        return host
    number = re.search(r"(\d+)$", device)
    if number is None or int(number[1]) >= len(gpus):
        raise UsageError(
            f"the command puts tensors on {device}, but there are {len(gpus)} GPUs",
            hint="CUDA0 is the first GPU that is visible to the engine",
        )
    return gpus[int(number[1])]
