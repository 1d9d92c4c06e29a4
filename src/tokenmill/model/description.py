"""A model without files: its GGUF keys and vocabulary, from which `header` makes the header of any quantization.

Descriptions come from the catalogue (`catalog`) or from a config.json (`derived`). `tensor_table` derives the tensors
from the keys, `quant_mix` their types from the name of the quantization.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tokenmill.errors import UnknownModel
from tokenmill.model import quant_mix
from tokenmill.model.gguf import GgufHeader
from tokenmill.model.gguf_write import Encoded, Plain, TensorRow, encode
from tokenmill.model.synthetic import vocabulary
from tokenmill.model.tensor_table.parts import ArchitectureKeys, Extras, TensorSlot
from tokenmill.model.tensor_table.slots import file_order, slots

GHOST_KEY = "tokenmill.ghost"
"""GGUF key that marks a file without weights."""
_QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION
_TEMPLATE_MARK = "{#- minimal template by tokenmill, not the model's own -#}"


@dataclass(frozen=True, slots=True)
class VocabularyFacts:
    """The tokenizer: splitting rules, size and ids of special tokens."""

    tokens: int
    pre: str = "default"  # llama.cpp's name for the splitting rules
    special: dict[str, int] = field(default_factory=dict)  # text -> id
    ids: dict[str, int] = field(default_factory=dict)  # bos, eos, ... -> id, as tokenizer.ggml.<name>_token_id
    add_bos: bool | None = None
    template: str | None = None  # a minimal chat template, not the published one


@dataclass(frozen=True, slots=True)
class Mix:
    """A quantization that is not one of llama-quantize's mixes."""

    base: str  # mix of the tensors that match no pattern
    patterns: dict[str, str] = field(default_factory=dict)  # tensor name pattern -> type; the first match decides
    scales: tuple[str, ...] = ()  # endings of names with an additional f32 scale per expert
    file_type: int | None = None
    note: str | None = None  # whose files these are, and where the recipe is published


@dataclass(frozen=True, slots=True)
class Description:
    """One model without files."""

    title: str
    architecture: str
    keys: dict[str, Plain]  # without the architecture's prefix
    words: VocabularyFacts
    extras: Extras = field(default_factory=Extras)
    mixes: dict[str, Mix] = field(default_factory=dict)
    pinned: dict[str, str] = field(default_factory=dict)  # tensor name pattern -> type, in every quantization

    def full_keys(self) -> dict[str, Plain]:
        """The keys with the architecture's prefix, as in the file."""
        return {f"{self.architecture}.{key}": value for key, value in self.keys.items()}

    def slots(self) -> list[TensorSlot]:
        """Names and shapes of all tensors, in file order."""
        return slots(self.architecture, self.full_keys(), self.words.tokens, self.extras)

    def traits(self) -> quant_mix.MixTraits:
        """The properties that the choice of types depends on."""
        own = ArchitectureKeys(self.architecture, self.full_keys())
        heads = own["attention.head_count"]
        kv_heads = own.at("attention.head_count_kv", 0)
        return quant_mix.MixTraits(
            layers=own["block_count"],
            experts=own.get("expert_count"),
            queries_per_kv_head=heads // kv_heads if kv_heads else 0,
            tied_output=self.extras.tied_output,
            llama_70b=self.architecture == "llama" and own["block_count"] == 80 and heads != kv_heads,
            mxfp4_experts_only=self.architecture == "bailingmoe3",
        )

    def quants(self) -> tuple[str, ...]:
        """All quantizations that can be requested, the model's own first."""
        own = tuple(self.mixes)
        return own + tuple(mix for mix in quant_mix.FILE_TYPES if mix not in own)

    def quant(self, text: str, name: str) -> str:
        """Normalize the name of a quantization. Raises `UnknownModel` with the nearest ones; `name` is the model's."""
        known = {quant.casefold(): quant for quant in self.quants()}
        if (found := known.get(text.casefold())) is not None:
            return found
        near = difflib.get_close_matches(text.casefold(), known, n=1, cutoff=0.3)
        nearest = f"did you mean {known[near[0]]}? " if near else ""
        raise UnknownModel(
            f"{name} has no quantization {text!r}", hint=f"{nearest}use one of {', '.join(self.quants())}"
        )


def header(found: Description, quant: str, source: str, *, words: bool = True) -> GgufHeader:
    """The header of a model in one quantization; `source` is its name in errors.

    `words=False` omits the vocabulary, which takes most of the time.
    """
    ghost = encoded(found, quant, source, words=words).header
    return replace(ghost, keys={key: value for key, value in ghost.keys.items() if key != GHOST_KEY})


def encoded(found: Description, quant: str, source: str, *, words: bool = True) -> Encoded:
    """The encoded header of a model's ghost file, which has the key that marks ghosts."""
    mix = found.mixes.get(quant, Mix(base=quant))
    general: dict[str, Plain] = {
        "general.architecture": found.architecture,
        "general.type": "model",
        "general.name": found.title,
        "general.file_type": quant_mix.FILE_TYPES[mix.base][0] if mix.file_type is None else mix.file_type,
        "general.quantization_version": _QUANTIZATION_VERSION,
        GHOST_KEY: True,
    }
    keys = {**general, **found.full_keys(), **(_vocabulary(found.words) if words else {})}
    return encode(keys, _tensors(found, mix), source)


def _tensors(found: Description, mix: Mix) -> tuple[TensorRow, ...]:
    listed = found.slots()
    types = quant_mix.choose(mix.base, listed, found.traits(), {**found.pinned, **mix.patterns})
    rows = [(name, shape, kind) for (name, shape), kind in zip(listed, types, strict=True)]
    rows += [
        (name.replace(".weight", ".scale"), (shape[2] if len(shape) == 3 else 1,), "F32")
        for name, shape, _ in rows
        if name.endswith(mix.scales)
    ]
    return tuple(sorted(rows, key=lambda row: file_order(row[0])))


def _vocabulary(words: VocabularyFacts) -> dict[str, Plain]:
    built = vocabulary.build(words.tokens, {**_unnamed(words), **words.special})
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


def _unnamed(words: VocabularyFacts) -> Mapping[str, int]:
    """Placeholders for special tokens of which only the id is known."""
    named = set(words.special.values())
    return {f"<|{token}|>": token for token in words.ids.values() if token not in named}
