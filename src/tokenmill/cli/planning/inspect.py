"""`tokenmill inspect`: shows a model's properties, read from its header."""

from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from tokenmill.api import inspecting as api
from tokenmill.cli.options import RequiredModel
from tokenmill.cli.output import Common, show, show_json
from tokenmill.model.profile import LayerCache, Profile, TensorClass, Tokenizer
from tokenmill.model.tensor_types import CACHE_TYPES
from tokenmill.units import format_bytes, format_count

SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
SHOWN_CACHE_TYPES = ("f16", "q8_0", "q4_0")


def inspect(
    model: RequiredModel,
    *,
    layers: bool = False,
    tensors: Annotated[bool, Parameter(name="--tensors")] = False,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Show a model's architecture, size and memory needs.

    Reads only the header of the file, so remote files and catalogue names work as well.

        tokenmill inspect kimi-k2.5:Q4_K_S

    Parameters
    ----------
    model:
        GGUF file (any split), its http(s) URL, safetensors folder, config.json with a quantization such as
        config.json:Q4_K_M, hf:OWNER/REPO:QUANT, catalogue name such as kimi-k2.5:Q4_K_S, or name of a downloaded model
        such as smollm2. Nothing is downloaded.
    layers:
        Also list the bytes of each tensor class by layer.
    tensors:
        Also list every tensor.
    """
    profile = api.inspect(model, config=common.load_config())
    if common.json:
        show_json(_document(profile, tensors=tensors))
        return
    show(_summary(profile), Text(), _classes(profile), Text(), _reads(profile), Text(), _cache(profile))
    if layers:
        show(Text(), _layers(profile))
    if tensors:
        show(Text(), _tensors(profile))
    for guess in profile.guesses:
        show(Text(f"guess: {guess}"))


def _summary(profile: Profile) -> Table:
    table = Table.grid(padding=(0, 2))
    experts = profile.experts
    tokenizer = profile.tokenizer
    mix = ", ".join(f"{name} {100 * size / profile.bytes:.1f} %" for name, size in profile.by_type().items())
    rows = {
        "model": profile.name + (" (ghost: header without weights)" if profile.ghost else ""),
        "architecture": f"{profile.architecture}, {profile.layers} layers"
        + (f", embedding {profile.embedding_length}" if profile.embedding_length else ""),
        "files": f"{len(profile.files)}, {format_bytes(sum(file.bytes for file in profile.files))}",
        "weights": f"{format_bytes(profile.bytes)}, {profile.bits_per_weight:.2f} bits per weight",
        "types": f"{profile.quantisation + ': ' if profile.quantisation else ''}{mix}",
        "parameters": f"{format_count(profile.parameters)}, {format_count(profile.active_parameters)} active per token",
        "experts": "none"
        if experts is None
        else f"{experts.count}, {experts.used} used" + (f", {experts.shared} shared" if experts.shared else ""),
        "context": "unknown" if profile.training_context is None else f"{profile.training_context} tokens in training",
        "tokenizer": _tokenizer(tokenizer),
    }
    for label, value in rows.items():
        table.add_row(Text(label, style="bold"), Text(value))
    return table


def _tokenizer(tokenizer: Tokenizer) -> str:
    if tokenizer.model is None:
        return "none"
    parts = (tokenizer.model, tokenizer.pre, f"{tokenizer.tokens} tokens" if tokenizer.tokens else None)
    return ", ".join([part for part in parts if part] + [f"{'' if tokenizer.chat_template else 'no '}chat template"])


def _classes(profile: Profile) -> Table:
    table = Table("class", title="bytes by tensor class", title_justify="left", box=None, pad_edge=False)
    for column in ("tensors", "bytes", "share", "read per token"):
        table.add_column(column, justify="right")
    for cls, size in profile.by_class().items():
        count = sum(1 for _ in profile.of(cls))
        table.add_row(
            cls.value,
            str(count),
            format_bytes(size),
            f"{100 * size / profile.bytes:.1f} %",
            format_bytes(round(profile.read_bytes(1, cls))),
        )
    return table


def _reads(profile: Profile) -> Table:
    table = Table(
        "concurrent sequences",
        title="weights read per decode step",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for sequences in SEQUENCES:
        table.add_column(str(sequences), justify="right")
    steps = [profile.read_bytes(sequences) for sequences in SEQUENCES]
    table.add_row("GB per step", *(f"{step / 1e9:.3g}" for step in steps))
    table.add_row("GB per token", *(f"{step / count / 1e9:.3g}" for step, count in zip(steps, SEQUENCES, strict=True)))
    if profile.experts:
        table.add_row("distinct experts", *(f"{profile.experts.distinct(count):.0f}" for count in SEQUENCES))
    return table


def _cache(profile: Profile) -> Table:
    table = Table(
        "layers", "kind", title="KV cache per token of context", title_justify="left", box=None, pad_edge=False
    )
    for name in ("K", "V", *SHOWN_CACHE_TYPES):
        table.add_column(name, justify="right")
    for layer, count in _grouped(profile.cache).items():
        table.add_row(
            str(count),
            _kind(layer),
            str(layer.k_elements),
            str(layer.v_elements),
            *(_per_token(layer, name, count) for name in SHOWN_CACHE_TYPES),
        )
    context = min(32768, profile.training_context or 32768)
    at_context = (format_bytes(profile.cache_bytes(context, name, name)) for name in SHOWN_CACHE_TYPES)
    table.add_row(str(len(profile.cache)), f"one sequence of {context} tokens", "", "", *at_context)
    return table


def _grouped(cache: tuple[LayerCache, ...]) -> dict[LayerCache, int]:
    groups: dict[LayerCache, int] = {}
    for layer in cache:
        groups[layer] = groups.get(layer, 0) + 1
    return groups


def _kind(layer: LayerCache) -> str:
    if layer.kind == "recurrent":
        return f"recurrent, {format_bytes(layer.state_bytes)} a sequence"
    if layer.kind == "latent":
        return "latent (V is a view of K)"
    return layer.kind if layer.span_tokens is None else f"{layer.kind} of {layer.span_tokens}"


def _per_token(layer: LayerCache, cache_type: str, count: int) -> str:
    return f"{count * layer.bytes_per_token(cache_type, cache_type):.0f} B"


def _layers(profile: Profile) -> Table:
    present = [cls for cls in TensorClass if cls in profile.by_class()]
    table = Table("layer", title="MiB in each layer", title_justify="left", box=None, pad_edge=False)
    for cls in present:
        table.add_column(cls.value.replace("_", "\n"), justify="right")
    for layer, row in sorted(profile.by_layer().items(), key=lambda item: -1 if item[0] is None else item[0]):
        cells = (f"{row[cls] / (1 << 20):.1f}" if cls in row else "" for cls in present)
        table.add_row("none" if layer is None else str(layer), *cells)
    return table


def _tensors(profile: Profile) -> Table:
    table = Table("tensor", "class", "shape", "type", box=None, pad_edge=False)
    table.add_column("bytes", justify="right")
    for tensor in profile.tensors:
        shape = "x".join(map(str, tensor.shape))
        table.add_row(tensor.name, tensor.cls.value, shape, tensor.type, format_bytes(tensor.bytes))
    return table


def _document(profile: Profile, *, tensors: bool) -> dict[str, Any]:
    """The profile and derived figures; the tensor table only on request, because it is long."""
    document = asdict(profile)
    if not tensors:
        del document["tensors"]
    return document | {
        "bytes": profile.bytes,
        "tensor_count": len(profile.tensors),
        "parameters": profile.parameters,
        "active_parameters": profile.active_parameters,
        "bits_per_weight": round(profile.bits_per_weight, 4),
        "bytes_by_class": profile.by_class(),
        "bytes_by_type": profile.by_type(),
        "bytes_by_layer": [{"layer": layer, **row} for layer, row in profile.by_layer().items()],
        "read_bytes_per_step": {count: round(profile.read_bytes(count)) for count in SEQUENCES},
        "kv_bytes_per_token": profile.kv_bytes_per_token(),
        "kv_bytes_per_token_by_layer": {
            name: [layer.bytes_per_token(name, name) for layer in profile.cache] for name in CACHE_TYPES
        },
    }
