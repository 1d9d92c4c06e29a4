"""Builds a model's `Profile` from the headers of its GGUF files. Pure."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenmill.errors import CorruptModel, ModelError
from tokenmill.model.architectures import classify, layer_of
from tokenmill.model.gguf import GgufHeader, LongArray, MetadataValue
from tokenmill.model.kv_layout import layout
from tokenmill.model.profile import Experts, ModelFile, ModelFormat, Profile, Tensor, TensorClass, Tokenizer

MAX_LAYERS = 4096
MAX_NAME_CHARS = 256  # longer names are shortened for display
FILE_TYPES = {  # general.file_type as in the `gguf` package, whose import takes a quarter of a second
    0: "ALL_F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
    39: "NVFP4",
    40: "Q1_0",
    1024: "GUESSED",
}


def describe(headers: Sequence[GgufHeader], *, format: ModelFormat = "gguf") -> Profile:
    """Build the profile of a model from the headers of all its files.

    Raises `ModelError` for files that are not a model, `CorruptModel` for contradictory headers.
    """
    first = headers[0]
    architecture = first.text("general.architecture")
    if not architecture:
        raise ModelError(
            f"{first.source} has no key general.architecture", hint="it may be a LoRA or a vocabulary file"
        )
    if not any(header.tensors for header in headers):
        raise ModelError(f"{first.source} has no tensors", hint="it may be a vocabulary file")
    if len(architecture) > MAX_NAME_CHARS:
        raise CorruptModel(f"{first.source}: general.architecture has {len(architecture)} characters")
    numbers = _Numbers(first.keys, architecture)
    entries = [(index, header, entry) for index, header in enumerate(headers) for entry in header.tensors]
    names = [entry.name for _, _, entry in entries]
    if len(set(names)) != len(names):
        raise CorruptModel(f"{first.source}: two of its files contain the same tensor")
    layers, guesses = _layers(numbers, names, first.source)
    experts, expert_guesses = _experts(numbers, [(entry.name, entry.shape) for _, _, entry in entries], first.source)
    cache = layout(first.keys, architecture, layers)
    predicts = any(name.endswith("nextn.eh_proj.weight") for name in names)
    return Profile(
        name=_short(first.text("general.name")) or Path(first.source).stem,
        format=format,
        architecture=architecture,
        tensors=tuple(
            Tensor(
                name=entry.name,
                cls=classify(entry.name, entry.shape, experts=experts.count if experts else None, layers=layers),
                layer=layer_of(entry.name),
                shape=entry.shape,
                type=entry.type,
                bytes=entry.bytes,
                elements=entry.elements,
                file=index,
                offset=header.data_offset + entry.offset,
            )
            for index, header, entry in entries
        ),
        files=tuple(ModelFile(header.source, header.file_bytes) for header in headers),
        layers=layers,
        cache=cache.layers,
        prediction=cache.prediction if predicts else (),
        experts=experts,
        embedding_length=numbers.largest("embedding_length"),
        heads=numbers.largest("attention.head_count"),
        kv_heads=numbers.largest("attention.head_count_kv"),
        training_context=numbers.largest("context_length"),
        tokenizer=_tokenizer(first),
        quantisation=_quantisation(first),
        ghost=first.keys.get("tokenmill.ghost") is True,
        guesses=tuple(guesses)
        + tuple(expert_guesses)
        + cache.guesses
        + tuple(dict.fromkeys(guess for header in headers for guess in header.guesses)),
    )


class _Numbers:
    """Integer keys of one architecture; an array (one value per layer) counts as its largest value."""

    def __init__(self, keys: Mapping[str, MetadataValue], architecture: str) -> None:
        self._keys = keys
        self._prefix = f"{architecture}."

    def largest(self, name: str) -> int | None:
        value = self._keys.get(self._prefix + name)
        values = value if isinstance(value, tuple) else (value,)
        numbers = [item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0]
        return max(numbers, default=None)


def _layers(numbers: _Numbers, names: Sequence[str], source: str) -> tuple[int, list[str]]:
    """Number of decoding layers, without those for multi-token prediction, and guesses."""
    count = numbers.largest("block_count")
    guesses = []
    present = 1 + max((layer for name in names if (layer := layer_of(name)) is not None), default=-1)
    if count is None:
        count = present
        guesses.append("block_count is missing, so the layers are counted by tensor names")
    if count > MAX_LAYERS or present > MAX_LAYERS:
        raise CorruptModel(f"{source} claims more than {MAX_LAYERS} layers")
    return max(0, count - (numbers.largest("nextn_predict_layers") or 0)), guesses


def _experts(
    numbers: _Numbers, tensors: Sequence[tuple[str, tuple[int, ...]]], source: str
) -> tuple[Experts | None, list[str]]:
    count = numbers.largest("expert_count")
    used = numbers.largest("expert_used_count")
    if count and used:
        if used > count:
            raise CorruptModel(f"{source} claims to use {used} of {count} experts")
        return Experts(count, used, numbers.largest("expert_shared_count")), []
    if any(classify(name, shape) is TensorClass.ROUTED_EXPERTS for name, shape in tensors):
        return None, ["the number of experts per token is unknown, so every token counts as reading all experts"]
    return None, []


def _tokenizer(header: GgufHeader) -> Tokenizer:
    tokens = header.keys.get("tokenizer.ggml.tokens")
    return Tokenizer(
        model=_short(header.text("tokenizer.ggml.model")),
        pre=_short(header.text("tokenizer.ggml.pre")),
        tokens=tokens.count if isinstance(tokens, LongArray) else len(tokens) if isinstance(tokens, tuple) else None,
        chat_template="tokenizer.chat_template" in header.keys,
    )


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= MAX_NAME_CHARS else f"{text[:MAX_NAME_CHARS]}..."


def _quantisation(header: GgufHeader) -> str | None:
    """llama.cpp's name of the file's mix; None for the additional numbers of ik_llama.cpp."""
    number = header.integer("general.file_type")
    return FILE_TYPES.get(number) if number is not None else None
