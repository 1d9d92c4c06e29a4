"""Models by name, such as `kimi-k2.5:Q4_K_S`, without a file.

Each file in entries/ lists a model's GGUF keys. `architectures` derives the tensors from the keys, `quant_mix` their
types from the name of the quantization. The result is the header of the real file with a placeholder vocabulary.
"""

import re
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path

from tokenmill.decode import read_toml
from tokenmill.errors import UnknownModel
from tokenmill.model import architectures, quant_mix
from tokenmill.model.gguf import GgufHeader, is_url
from tokenmill.model.gguf_write import Encoded, Plain, TensorRow, encode
from tokenmill.model.synthetic import vocabulary

_ENTRIES = resources.files("tokenmill.model") / "entries"
GHOST_KEY = "tokenmill.ghost"
"""GGUF key that marks a file without weights."""
_QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION
_TEMPLATE_MARK = "{#- minimal template by tokenmill, not the model's own -#}"
_NAME = re.compile(r"[\w.-]+(:[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class CatalogTokenizer:
    """The tokenizer: splitting rules, size and ids of special tokens."""

    pre: str  # llama.cpp's name for the splitting rules
    tokens: int
    special: dict[str, int]  # text -> id
    ids: dict[str, int]  # bos, eos, eot, ... -> id, as tokenizer.ggml.<name>_token_id
    add_bos: bool | None = None
    template: str | None = None  # a minimal chat template, not the published one


@dataclass(frozen=True, slots=True)
class Mix:
    """A quantization that is not one of llama-quantize's mixes."""

    base: str  # mix of the tensors that match no pattern
    patterns: dict[str, str] = field(default_factory=dict)  # tensor name pattern -> type; the first match decides
    scales: tuple[str, ...] = ()  # endings of names with an additional f32 scale per expert
    file_type: int | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One model of the catalogue."""

    title: str
    architecture: str
    sources: tuple[str, ...]
    keys: dict[str, Plain]  # without the architecture's prefix
    words: CatalogTokenizer
    listed: tuple[str, ...]  # quantizations shown in lists; all mixes of llama-quantize can be requested
    extras: architectures.Extras = field(default_factory=architectures.Extras)
    mixes: dict[str, Mix] = field(default_factory=dict)
    pinned: dict[str, str] = field(default_factory=dict)  # tensor name pattern -> type, in every quantization

    def full_keys(self) -> dict[str, Plain]:
        """The keys with the architecture's prefix, as in the file."""
        return {f"{self.architecture}.{key}": value for key, value in self.keys.items()}

    def slots(self) -> list[architectures.TensorSlot]:
        """Names and shapes of all tensors, in file order."""
        return architectures.slots(self.architecture, self.full_keys(), self.words.tokens, self.extras)

    def traits(self) -> quant_mix.MixTraits:
        """The properties that the choice of types depends on."""
        own = architectures.ArchitectureKeys(self.architecture, self.full_keys())
        heads = own["attention.head_count"]
        kv_heads = own["attention.head_count_kv"]
        return quant_mix.MixTraits(
            layers=own["block_count"],
            experts=own.get("expert_count"),
            queries_per_kv_head=heads // kv_heads,
            tied_output=self.extras.tied_output,
            llama_70b=self.architecture == "llama" and own["block_count"] == 80 and heads != kv_heads,
        )


def names() -> tuple[str, ...]:
    """All model names of the catalogue, sorted."""
    return tuple(sorted(path.name.removesuffix(".toml") for path in _ENTRIES.iterdir() if path.name.endswith(".toml")))


def listed() -> tuple[str, ...]:
    """All `model:quant` names to list."""
    return tuple(f"{name}:{quant}" for name in names() for quant in entry(name).listed)


@cache
def entry(name: str) -> CatalogEntry:
    """The entry of a model. Raises `UnknownModel`."""
    if name not in names():
        raise UnknownModel(
            f"no model {name!r} in the catalogue, and no such file", hint=f"the catalogue has {', '.join(names())}"
        )
    with resources.as_file(_ENTRIES / f"{name}.toml") as path:
        return read_toml(CatalogEntry, Path(path))


def quants(name: str) -> tuple[str, ...]:
    """All quantizations that can be requested, those of the entry first."""
    own = tuple(entry(name).mixes)
    return own + tuple(mix for mix in quant_mix.FILE_TYPES if mix not in own)


def resolve(name: str) -> tuple[str, str]:
    """Normalize `Kimi-K2.5:q4_k_s` to (`kimi-k2.5`, `Q4_K_S`). Raises `UnknownModel`."""
    model, colon, quant = name.partition(":")
    model = model.lower()
    known = entry(model)
    if not colon or not quant:
        hint = f"for example {model}:{known.listed[0]}; others are {', '.join(known.listed[1:])}"
        raise UnknownModel(f"{model} needs a quantization", hint=hint)
    for candidate in quants(model):
        if candidate.lower() == quant.lower():
            return model, candidate
    raise UnknownModel(f"{model} has no quantization {quant!r}", hint=f"use one of {', '.join(quants(model))}")


def pull_hint(model: str) -> str:
    """What to run to download a model; the catalogue does not know the repositories of its models."""
    base, _, quant = model.partition(":")
    if is_url(model):
        return "download the file, or pull the model as hf:OWNER/REPO:QUANT"
    if base.lower() in names():
        return f"tokenmill models pull hf:OWNER/REPO:{quant or 'QUANT'}"
    return f"tokenmill models pull {model}"


def looks_like_name(text: str) -> bool:
    """Whether a text has the form of a catalogue name rather than of a path."""
    return _NAME.fullmatch(text) is not None and not text.lower().endswith((".gguf", ".safetensors"))


def header(name: str, *, words: bool = True) -> GgufHeader:
    """The header of a model, without the key that marks ghosts.

    `words=False` omits the vocabulary, which takes most of the time.
    """
    ghost = encoded(name, words=words).header
    return replace(ghost, keys={key: value for key, value in ghost.keys.items() if key != GHOST_KEY})


def encoded(name: str, *, words: bool = True) -> Encoded:
    """The encoded header of a model's ghost file; `words=False` omits the vocabulary."""
    model, quant = resolve(name)
    found = entry(model)
    mix = found.mixes.get(quant, Mix(base=quant))
    general: dict[str, Plain] = {
        "general.architecture": found.architecture,
        "general.type": "model",
        "general.name": found.title,
        "general.file_type": _file_type(mix),
        "general.quantization_version": _QUANTIZATION_VERSION,
        GHOST_KEY: True,
    }
    keys = {**general, **found.full_keys(), **(_words(found.words) if words else {})}
    return encode(keys, _tensors(found, mix), f"{model}:{quant}")


def _tensors(found: CatalogEntry, mix: Mix) -> tuple[TensorRow, ...]:
    slots = found.slots()
    types = quant_mix.choose(mix.base, slots, found.traits(), {**found.pinned, **mix.patterns})
    rows = [(name, shape, kind) for (name, shape), kind in zip(slots, types, strict=True)]
    rows += [
        (name.replace(".weight", ".scale"), (shape[2] if len(shape) == 3 else 1,), "F32")
        for name, shape, _ in rows
        if name.endswith(mix.scales)
    ]
    return tuple(sorted(rows, key=lambda row: architectures.file_order(row[0])))


def _file_type(mix: Mix) -> int:
    return quant_mix.FILE_TYPES[mix.base][0] if mix.file_type is None else mix.file_type


def _words(words: CatalogTokenizer) -> dict[str, Plain]:
    built = vocabulary.build(words.tokens, words.special)
    keys: dict[str, Plain] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": words.pre,
        "tokenizer.ggml.tokens": built.tokens,
        "tokenizer.ggml.token_type": built.types,
        "tokenizer.ggml.merges": built.merges,
        **{f"tokenizer.ggml.{role}_token_id": token for role, token in words.ids.items()},
    }
    if words.add_bos is not None:
        keys["tokenizer.ggml.add_bos_token"] = words.add_bos
    if words.template is not None:
        keys["tokenizer.chat_template"] = _TEMPLATE_MARK + words.template
    return keys
