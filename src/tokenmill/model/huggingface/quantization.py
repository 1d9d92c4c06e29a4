"""Reads the quantization scheme of a Hugging Face checkpoint, and counts the parameters of its stored tensors.

Name and bits come from `quantization_config` (or ModelOpt's hf_quant_config.json). The number of values per stored
number is derived from the shapes of weight and scale if possible, because configs list exceptions in the pattern
language of each quantizer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from tokenmill.model.huggingface.safetensors_header import DTYPE_BITS, StoredTensor
from tokenmill.model.huggingface.tensors import OVERHEAD, storage


@dataclass(frozen=True, slots=True)
class QuantGroup:
    """One kind of packed weights in a scheme."""

    bits: int
    group_size: int | None = None  # weights under one scale
    is_float: bool = False


@dataclass(frozen=True, slots=True)
class Scheme:
    """The quantization in the config."""

    name: str | None = None  # nvfp4, awq-4bit, compressed-tensors w4a16; None: not quantized, or unknown
    groups: tuple[QuantGroup, ...] = ()


def scheme_of(config: Mapping[str, Any], quant_file: Mapping[str, Any] | None = None) -> Scheme:
    """Read the scheme from config.json's `quantization_config`, else from hf_quant_config.json."""
    declared = config.get("quantization_config") or config.get("compression_config")
    if isinstance(declared, Mapping):
        method = _word(declared.get("quant_method")) or _word(declared.get("quant_type")) or "unknown"
        return _METHODS.get(method, _by_bits)(method, declared)
    if quant_file is not None:
        inner = quant_file.get("quantization")
        return _modelopt("modelopt", inner if isinstance(inner, Mapping) else quant_file)
    mlx = config.get("quantization")
    if isinstance(mlx, Mapping) and (bits := _bits(mlx.get("bits"))):
        return Scheme(f"mlx-{bits}bit", (QuantGroup(bits, _count(mlx.get("group_size"))),))
    return Scheme()


def _by_bits(method: str, declared: Mapping[str, Any]) -> Scheme:
    bits = _bits(declared.get("bits")) or _bits(declared.get("w_bit"))
    method = method.removeprefix("intel/")
    if bits is None:
        return Scheme(method)
    return Scheme(f"{method}-{bits}bit", (QuantGroup(bits, _count(declared.get("group_size"))),))


def _fp8(_method: str, _declared: Mapping[str, Any]) -> Scheme:
    return Scheme("fp8")


def _mxfp4(_method: str, _declared: Mapping[str, Any]) -> Scheme:
    return Scheme("mxfp4", (QuantGroup(4, 32, is_float=True),))


def _bitnet(_method: str, _declared: Mapping[str, Any]) -> Scheme:
    return Scheme("bitnet", (QuantGroup(2),))


def _bitsandbytes(_method: str, declared: Mapping[str, Any]) -> Scheme:
    if declared.get("load_in_4bit") is True:
        kind = _word(declared.get("bnb_4bit_quant_type")) or "fp4"
        return Scheme(f"bnb-{kind}", (QuantGroup(4, 64, is_float=True),))
    return Scheme("bnb-int8", (QuantGroup(8),))


def _quark(method: str, declared: Mapping[str, Any]) -> Scheme:
    overall = declared.get("global_quant_config")
    weight = overall.get("weight") if isinstance(overall, Mapping) else None
    kind = _word(weight.get("dtype")) if isinstance(weight, Mapping) else None
    if kind == "fp4":
        return _mxfp4(method, declared)
    return Scheme("fp8" if kind and kind.startswith("fp8") else f"quark-{kind}" if kind else "quark")


def _modelopt(method: str, declared: Mapping[str, Any]) -> Scheme:
    algorithm = _word(declared.get("quant_algo"))
    if algorithm == "mixed_precision" and isinstance(layers := declared.get("quantized_layers"), Mapping):
        found = {_word(layer.get("quant_algo")) for layer in layers.values() if isinstance(layer, Mapping)}
        algorithm = "+".join(sorted(name for name in found if name)) or algorithm
    if algorithm is None:
        return Scheme(method)
    name = algorithm.replace("_", "-").replace("w4a16-awq", "awq-4bit")
    if "nvfp4" in name:
        return Scheme(name, (QuantGroup(4, _count(declared.get("group_size")) or 16, is_float=True),))
    return Scheme(name, (QuantGroup(4, _count(declared.get("group_size"))),) if "4" in name else ())


def _compressed(method: str, declared: Mapping[str, Any]) -> Scheme:
    groups = []
    names = []
    table = declared.get("config_groups")
    for item in table.values() if isinstance(table, Mapping) else ():
        weights = item.get("weights") if isinstance(item, Mapping) else None
        if not isinstance(weights, Mapping) or (bits := _bits(weights.get("num_bits"))) is None:
            continue
        group = QuantGroup(bits, _count(weights.get("group_size")), is_float=weights.get("type") == "float")
        groups.append(group)
        inputs = item.get("input_activations")
        act_bits = _bits(inputs.get("num_bits")) if isinstance(inputs, Mapping) else None
        names.append(_compressed_name(group, act_bits or 16))
    distinct = list(dict.fromkeys(names))
    floats = [name for name in distinct if not name.startswith("w")]
    integers = [name for name in distinct if name.startswith("w")]
    parts = floats + ([f"{method} {'+'.join(integers)}"] if integers else [])
    return Scheme(" + ".join(parts) or method, tuple(groups))


def _compressed_name(group: QuantGroup, act_bits: int) -> str:
    if group.is_float and group.bits == 4:
        return "mxfp4" if group.group_size == 32 else "nvfp4"
    return "fp8" if group.is_float and group.bits == 8 else f"w{group.bits}a{act_bits}"


_METHODS: dict[str, Callable[[str, Mapping[str, Any]], Scheme]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "bitnet": _bitnet,
    "bitsandbytes": _bitsandbytes,
    "quark": _quark,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
}


def _word(value: object) -> str | None:
    return value.lower() if isinstance(value, str) and value.isprintable() and 0 < len(value) <= 64 else None


def _bits(value: object) -> int | None:
    return value if type(value) is int and 1 <= value <= 16 else None


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 < value < 1 << 31 else None


class Meaning(NamedTuple):
    """The parameters that a stored tensor represents."""

    parameters: int
    type: str
    guessed: bool = False  # shapes and config do not determine the number of values per stored number


Find = Callable[[str], StoredTensor | None]


def meaning(name: str, stored: StoredTensor, find: Find, scheme: Scheme) -> Meaning:
    """The number of parameters in a stored tensor, and its type name.

    `find` returns the tensor with another name. Scales, zero points and index tensors contain no parameters.
    """
    dtype = stored.dtype
    numbers = prod(stored.shape)
    module, part = storage(name)
    if part in OVERHEAD or dtype in ("BOOL", "I64", "U64") or _beside_weight(module, part, find):
        return Meaning(0, dtype)
    if part == "blocks" and dtype == "U8":
        return Meaning(2 * numbers, "MXFP4")
    if part == "qweight" and dtype in ("I32", "U32", "I16"):
        bits = _qweight_bits(module, find) or (scheme.groups[0].bits if scheme.groups else None)
        return Meaning(numbers * DTYPE_BITS[dtype] // (bits or 4), f"INT{bits or 4}", guessed=bits is None)
    if dtype == "U8" and find(f"{module}.weight.absmax"):
        return Meaning(2 * numbers, "FP4" if scheme.name == "bnb-fp4" else "NF4")
    scale = _scale(module, find) if dtype in ("U8", "I8", "I32", "U32") and part != "bias" else None
    return Meaning(numbers, dtype) if scale is None else _by_scale(stored, scale, scheme)


def _beside_weight(module: str, part: str, find: Find) -> bool:
    """Whether a `.scale` (DeepSeek) or `.biases` (MLX) belongs to a quantized weight and is therefore overhead."""
    if part == "biases":
        return find(f"{module}.scales") is not None
    weight = find(f"{module}.weight") if part == "scale" else None
    return weight is not None and DTYPE_BITS.get(weight.dtype, 16) <= 8


def _by_scale(stored: StoredTensor, scale: StoredTensor, scheme: Scheme) -> Meaning:
    """Integers with scales, where the values per number follow from the number of stored bits per scale."""
    dtype = stored.dtype
    numbers = prod(stored.shape)
    width = DTYPE_BITS[stored.dtype]
    covered_bits = numbers * width / (prod(scale.shape) or 1)
    shared_exponent = scale.dtype in ("U8", "F8_E8M0")
    if width == 8 and covered_bits == 16 * 4 and scale.dtype == "F8_E4M3":
        return Meaning(2 * numbers, "NVFP4")
    if width == 8 and covered_bits == 32 * 4 and shared_exponent:
        return Meaning(2 * numbers, "MXFP4")
    if dtype == "I8" or (width == 8 and covered_bits == 32 * 8 and shared_exponent):
        return Meaning(numbers, dtype)
    fitting = [group for group in scheme.groups if group.group_size and covered_bits == group.group_size * group.bits]
    group = next(iter(fitting or scheme.groups), None)
    if group is None:
        return Meaning(numbers * width // 4, "INT4", guessed=True)
    kind = {16: "NVFP", 32: "MXFP"}.get(group.group_size or 0, "FP") if group.is_float else "INT"
    return Meaning(numbers * width // group.bits, f"{kind}{group.bits}")


def _scale(module: str, find: Find) -> StoredTensor | None:
    for suffix in (".weight_scale", "_weight_scale", ".scales", ".scale", ".weight_scale_inv", "_scale_inv", "_scale"):
        if found := find(module + suffix):
            return found
    return None


def _qweight_bits(module: str, find: Find) -> int | None:
    """Bits of AWQ and GPTQ weights, from the shapes [groups, out] of scales and [groups, out packed] of zeros."""
    zeros = find(f"{module}.qzeros")
    scales = find(f"{module}.scales")
    if zeros is None or scales is None or len(zeros[1]) != 2 or len(scales[1]) != 2 or not scales[1][1]:
        return None
    bits, rest = divmod(32 * zeros[1][1], scales[1][1])
    return bits if rest == 0 and bits in (2, 3, 4, 8) else None
