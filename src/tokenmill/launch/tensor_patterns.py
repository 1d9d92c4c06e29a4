r"""Converts a placement to a few readable tensor patterns, and patterns back to a placement.

llama.cpp tries the clauses of --override-tensor in order; the first whose regular expression matches anywhere in a
tensor's name applies. Tensors that no clause matches are placed by -ngl and -ts. The order of clauses is:

  exceptions                     blk\.3\.attn_(k|v)\.weight   exact, and first
  experts that live on a GPU     blk\.(1[0-9]|2[0-4])\.ffn_.*_exps\.
  all other experts              exps
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from tokenmill.errors import NotSpellable, UsageError
from tokenmill.launch.layers import devices, gpu_order, layer_count, layer_flags
from tokenmill.model.profile import Profile, Tensor, TensorClass
from tokenmill.planner.plan import Placement

Clauses = list[tuple[str, str]]
HOST = "dram"  # llama.cpp calls all host memory CPU


@dataclass(frozen=True, slots=True)
class Naming:
    """Tensor names of a format."""

    prefix: str  # before the layer's number
    experts: str  # regex for routed experts, after the layer
    any_expert: str  # regex for routed experts of any layer

    def in_layer(self, layers: Iterable[int], rest: str = "") -> str:
        """A regex for names of these layers."""
        numbers = layers_regex(layers)
        return rf"{_literal(self.prefix)}{f'({numbers})' if '|' in numbers else numbers}\.{rest}"

    def inside(self, tensor: Tensor) -> str | None:
        """The part of a tensor's name after its layer; None for other names."""
        start = f"{self.prefix}{tensor.layer}."
        return tensor.name.removeprefix(start) if tensor.layer is not None and tensor.name.startswith(start) else None


GGUF = Naming("blk.", r"ffn_.*_exps\.", "exps")


def _naming(tensors: Sequence[Tensor]) -> Naming:
    prefixes = Counter(tensor.name.partition(f"{tensor.layer}.")[0] for tensor in tensors if tensor.layer is not None)
    prefix = prefixes.most_common(1)[0][0] if prefixes else GGUF.prefix
    return GGUF if prefix == GGUF.prefix else Naming(prefix, r".*\.experts\.", r"\.experts\.")


def patterns(placement: Placement, profile: Profile, *, output_first: bool = True) -> Clauses:
    """Ordered (regex, tier) overrides that complete -ngl and -ts to the given placement.

    All host tiers count as dram. `output_first`: as in `layers.devices`.
    """
    wanted = [_engine_tier(home) for home in placement.homes]
    return _overrides(profile.tensors, wanted, _by_rule(placement, profile, output_first=output_first))


def tiers_by_pattern(placement: Placement, profile: Profile) -> Clauses:
    """Ordered (regex, tier) for every tensor, independent of -ngl and -ts."""
    naming = _naming(profile.tensors)
    base: Clauses = []
    for tier in dict.fromkeys(placement.layers):
        base.append((naming.in_layer(index for index, where in enumerate(placement.layers) if where == tier), tier))
    outside = [index for index, tensor in enumerate(profile.tensors) if tensor.layer is None]
    for index in outside:
        base.append((f"^{_literal(profile.tensors[index].name)}", placement.homes[index]))
    last = Counter(placement.homes).most_common(1)[0][0] if placement.homes else HOST
    left = [resolve(tensor.name, base) or last for tensor in profile.tensors]
    clauses = [*_overrides(profile.tensors, list(placement.homes), left), *base]
    if any(resolve(tensor.name, clauses) is None for tensor in profile.tensors):
        clauses.append((".", last))
    return clauses


def resolve(name: str, clauses: Iterable[tuple[str, str]]) -> str | None:
    """The tier of the first matching clause; None if none matches."""
    return next((target for regex, target in clauses if _compiled(regex).search(name)), None)


@cache
def _compiled(regex: str) -> re.Pattern[str]:
    try:
        return re.compile(regex)
    except re.error as error:
        raise UsageError(
            f"{regex!r} is not a regular expression: {error}", hint="check its parentheses and brackets"
        ) from error


def layers_regex(layers: Iterable[int]) -> str:
    """A short alternation of numbers: 10 to 24 are `1[0-9]|2[0-4]`."""
    by_prefix: dict[str, list[int]] = {}
    for number in sorted(set(layers)):
        by_prefix.setdefault(str(number)[:-1], []).append(number % 10)
    shared: dict[str, list[str]] = {}
    for prefix, digits in by_prefix.items():
        shared.setdefault(_digits(digits), []).append(prefix)
    parts = []
    for last, prefixes in shared.items():
        tens = [int(prefix) for prefix in prefixes if len(prefix) == 1]
        parts += [(prefix, prefix + last) for prefix in prefixes if len(prefix) != 1]
        parts += [(str(tens[0]), _digits(tens) + last)] if tens else []
    return "|".join(text for _, text in sorted(parts, key=lambda part: (len(part[0]), part[0])))


def _digits(digits: Sequence[int]) -> str:
    """A class of single digits: `[0-9]`, `[3-57]`, `4`."""
    runs: list[list[int]] = []
    for digit in digits:
        if runs and digit == runs[-1][-1] + 1:
            runs[-1].append(digit)
        else:
            runs.append([digit])
    text = "".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else "".join(map(str, run)) for run in runs)
    return text if len(digits) == 1 else f"[{text}]"


def _by_rule(placement: Placement, profile: Profile, *, output_first: bool) -> list[str]:
    """The tier of every tensor by -ngl and -ts alone."""
    flags = layer_flags(placement, profile, output_first=output_first)
    gpus = gpu_order(placement)
    total = layer_count(profile)
    by_layer = devices(total, flags.gpu_layers, flags.tensor_split, len(gpus), output_first=output_first)
    tiers = [HOST if gpu is None else gpus[gpu] for gpu in by_layer]
    return [rule_home(tensor, tiers) for tensor in profile.tensors]


def rule_home(tensor: Tensor, tiers: Sequence[str]) -> str:
    """A tensor's tier by its layer; `tiers` has one entry per layer and the output's last."""
    if tensor.cls is TensorClass.EMBEDDING:
        return HOST
    return tiers[-1] if tensor.layer is None else tiers[tensor.layer]


def _engine_tier(tier: str) -> str:
    return tier if tier.startswith("gpu") else HOST


def _overrides(tensors: Sequence[Tensor], wanted: Sequence[str], base: Sequence[str]) -> Clauses:
    naming = _naming(tensors)
    clauses = _expert_clauses(tensors, wanted, base, naming)
    got = [resolve(tensor.name, clauses) or left for tensor, left in zip(tensors, base, strict=True)]
    clauses = [*_exceptions(tensors, wanted, got, naming), *clauses]
    for tensor, want, left in zip(tensors, wanted, base, strict=True):
        if (resolve(tensor.name, clauses) or left) != want:
            raise NotSpellable(f"no pattern places {tensor.name} as planned", hint="this is a bug; please report it")
    return clauses


def _expert_clauses(tensors: Sequence[Tensor], wanted: Sequence[str], base: Sequence[str], naming: Naming) -> Clauses:
    """Clauses for layers whose experts share a tier; the most common tier comes last and covers all the rest."""
    places: dict[int, set[str]] = {}
    strays: Counter[str] = Counter()
    for tensor, want, left in zip(tensors, wanted, base, strict=True):
        if tensor.layer is not None and _compiled(rf"\.{naming.experts}").search(tensor.name):
            places.setdefault(tensor.layer, set()).add(want)
            if want != left:
                strays[want] += 1
    if not strays:
        return []
    rest = strays.most_common(1)[0][0]
    whole: dict[str, list[int]] = {}
    for layer, found in places.items():
        if len(found) == 1 and found != {rest}:
            whole.setdefault(next(iter(found)), []).append(layer)
    by_first = sorted(whole.items(), key=lambda item: min(item[1]))
    return [
        *((naming.in_layer(layers, naming.experts), tier) for tier, layers in by_first),
        (naming.any_expert, rest),
    ]


def _exceptions(tensors: Sequence[Tensor], wanted: Sequence[str], got: Sequence[str], naming: Naming) -> Clauses:
    """Exact clauses for the remaining tensors, one per set of layers that agree."""
    of_layer: dict[int | None, set[str]] = {}  # wanted tiers of its tensors
    astray: dict[str, dict[int, set[str]]] = {}
    outside: Clauses = []
    for tensor, want, now in zip(tensors, wanted, got, strict=True):
        name = naming.inside(tensor)
        if name is not None:
            of_layer.setdefault(tensor.layer, set()).add(want)
        if want == now:
            continue
        if name is not None and tensor.layer is not None:
            astray.setdefault(want, {}).setdefault(tensor.layer, set()).add(name)
        else:
            outside.append((f"^{_literal(tensor.name)}$", want))
    clauses: Clauses = []
    for tier, by_layer in astray.items():
        alike: dict[frozenset[str], list[int]] = {}
        for layer, names in by_layer.items():
            alike.setdefault(frozenset() if of_layer[layer] == {tier} else frozenset(names), []).append(layer)
        clauses += [(naming.in_layer(layers, _names(names)), tier) for names, layers in alike.items()]
    return [*outside, *clauses]


def _names(names: frozenset[str]) -> str:
    """Alternatives for the part of a name after its layer; empty for all names."""
    if not names:
        return ""
    stems = sorted(name.removesuffix(".weight") for name in names)
    if all(name.endswith(".weight") for name in names):
        joined = "|".join(map(_literal, stems))
        return (joined if len(stems) == 1 else f"({joined})") + r"\.weight$"
    joined = "|".join(_literal(name) for name in sorted(names))
    return (joined if len(names) == 1 else f"({joined})") + "$"


def _literal(name: str) -> str:
    return re.sub(r"[^\w-]", lambda found: "\\" + found[0], name)
