"""Reads a folder of safetensors and its config.json, as vLLM and transformers do, into a `Profile`.

Reads only headers. Experts in separate tensors become one row per layer and projection, as in GGUF. Sizes come from the
tensor table; facts that the config lacks (layers, experts per token, cache) are assumed and reported as guesses.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from tokenmill.errors import CorruptModel, MissingSplit, UnknownModel, UsageError
from tokenmill.model.huggingface.config import (
    ConfigReader,
    declared_context,
    declared_experts,
    declared_heads,
    declared_layers,
    language_model,
    printable,
    read_object,
    tokenizer_in,
)
from tokenmill.model.huggingface.kv_layout import layout
from tokenmill.model.huggingface.quantization import Meaning, Scheme, meaning, scheme_of
from tokenmill.model.huggingface.safetensors_header import DTYPE_BITS, SafetensorsHeader, StoredTensor, read_header
from tokenmill.model.huggingface.tensors import EXPERT_INDEX, TensorRole, classify_hf, projections
from tokenmill.model.profile import Experts, ModelFile, Profile, Tensor, TensorClass

_INDEX = "model.safetensors.index.json"
_PART_OF = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


def shards_in(folder: Path, file: Path | None) -> dict[Path, frozenset[str]]:
    """The files of the model, each with its tensors according to the index (empty without an index)."""
    index = folder / _INDEX
    if not index.is_file():
        others = sorted(folder.glob("*.safetensors.index.json"))
        index = others[0] if len(others) == 1 else index
    if index.is_file():
        promised = _promised(index)
        if file is None or file.name in promised:
            missing = next((name for name in promised if not (folder / name).is_file()), None)
            if missing is not None:
                raise MissingSplit(f"{folder / missing} is missing; {index.name} lists it", hint="download that file")
            return {folder / name: names for name, names in promised.items()}
    files = _unlisted(folder) if file is None else [file]
    if not files:
        other = next((kind for kind in ("*.gguf", "*.bin", "*.pth", "*.pt") if any(folder.glob(kind))), None)
        raise UsageError(
            f"{folder} contains no safetensors files" + (f", only {other}" if other else ""),
            hint="give the .gguf file itself" if other == "*.gguf" else "give a folder with *.safetensors",
        )
    return {item: frozenset() for item in _whole_sets(files)}


def _promised(index: Path) -> dict[str, frozenset[str]]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptModel(f"{index} has no weight_map", hint="download this file again")
    by_file: dict[str, list[str]] = {}
    try:
        for tensor, file in weight_map.items():
            by_file.setdefault(file, []).append(tensor)
    except TypeError:
        raise CorruptModel(f"{index}: weight_map contains no file names", hint="download this file again") from None
    for file in by_file:
        if not printable(file) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CorruptModel(f"{index} contains {str(file)[:80]!r}, which is not the name of a safetensors file")
    return {file: frozenset(by_file[file]) for file in sorted(by_file)}


def _unlisted(folder: Path) -> list[Path]:
    """The files of a folder without an index: model.safetensors, else all except second copies and adapters."""
    files = sorted(folder.glob("*.safetensors"))
    main = [file for file in files if file.name == "model.safetensors"]
    first = [file for file in files if not file.name.startswith(("consolidated", "adapter"))]
    return main or first or files


def _whole_sets(files: Iterable[Path]) -> list[Path]:
    """Add the other files of sets named 00001-of-00004. Raises `MissingSplit`."""
    found: dict[Path, None] = {}
    for file in files:
        match = _PART_OF.fullmatch(file.name)
        numbers = range(1, int(match[3]) + 1) if match else ()
        for number in numbers:
            part = file.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.safetensors") if match else file
            if part not in found and not part.is_file():
                raise MissingSplit(f"{part} is missing, one of {len(numbers)} files", hint="download that file")
            found[part] = None
        found[file] = None
    return list(found)


def headers_of(shards: Mapping[Path, frozenset[str]]) -> Iterator[SafetensorsHeader]:
    """Read the headers of all files and check them against the index."""
    for path, promised in shards.items():
        header = read_header(path, split=len(shards) > 1)
        if promised and (absent := promised.difference(entry.name for entry in header.entries)):
            raise CorruptModel(
                f"{path} lacks {len(absent)} tensors of the index, such as {str(min(absent))[:80]!r}",
                hint="index and files may be of different versions: download both again",
            )
        yield header


MAX_LAYERS = 4096
MAX_TENSORS = 1_000_000
MAX_ROWS = 100_000  # with experts folded together, the largest models have a few thousand
_TYPE_NAMES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F8_E4M3": "fp8", "F8_E5M2": "fp8"}


def read_folder(path: Path) -> Profile:
    """Read a folder of safetensors, or one such file in the folder of its config.json.

    Raises `UnknownModel`, `UsageError` or `ModelError`.
    """
    if not path.exists():
        raise UnknownModel(f"no model at {path}", hint="give a folder with config.json and *.safetensors")
    folder = path if path.is_dir() else path.parent
    shards = shards_in(folder, None if path.is_dir() else path)
    name = _folder_name(folder) if path.is_dir() or len(shards) > 1 else path.stem
    about = _about(folder, name)
    return _profile(about, _fold(headers_of(shards)))


@dataclass(frozen=True, slots=True)
class _About:
    """Contents of the JSON files next to the weights."""

    folder: Path
    name: str
    architecture: str
    settings: ConfigReader
    scheme: Scheme


def _about(folder: Path, name: str) -> _About:
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{folder} has no config.json, which describes the model",
            hint="put the model's config.json into the folder of its safetensors files",
        )
    config = read_object(folder / "config.json")
    quant_path = folder / "hf_quant_config.json"
    quant_file = read_object(quant_path) if quant_path.is_file() else None
    outer = ConfigReader(config)
    settings = language_model(config)
    architecture = outer.word("model_type") or next(iter(outer.words("architectures")), None)
    return _About(folder, name, architecture or "unknown", settings, scheme_of(settings.values, quant_file))


@dataclass(slots=True)
class _Row:
    """Tensors that differ only in the number of the expert."""

    count: int
    bytes: int
    file: int
    offset: int


@dataclass(slots=True)
class _Table:
    """The tensor table of all files with one row for all experts, by name and storage."""

    rows: dict[tuple[str, StoredTensor], _Row] = field(default_factory=dict)
    files: list[ModelFile] = field(default_factory=list)

    def places(self, experts: int | None, layers: int) -> dict[tuple[str, StoredTensor], TensorRole]:
        return {key: classify_hf(key[0], key[1].shape, experts=experts, layers=layers) for key in self.rows}

    def first_stored(self) -> dict[str, StoredTensor]:
        stored: dict[str, StoredTensor] = {}
        for name, kept in self.rows:
            stored.setdefault(name, kept)
        return stored


def _fold(headers: Iterable[SafetensorsHeader]) -> _Table:
    table = _Table()
    seen = set[str]()
    for file, header in enumerate(headers):
        table.files.append(ModelFile(str(header.path), header.file_bytes))
        for name, stored, begin, end in header.entries:
            if name in seen:
                raise CorruptModel(f"{header.path} contains tensor {name!r}, which is also in an earlier file")
            seen.add(name)
            folded = EXPERT_INDEX.sub("*", name, count=1) if "experts." in name else name
            key = folded, stored
            row = table.rows.get(key)
            if row is None:
                table.rows[key] = _Row(1, end - begin, file, header.data_offset + begin)
            else:
                row.count += 1
                row.bytes += end - begin
        if len(seen) > MAX_TENSORS or len(table.rows) > MAX_ROWS:
            raise CorruptModel(f"{header.path.parent} contains {len(seen)} tensors, more than any model")
    return table


def _profile(about: _About, table: _Table) -> Profile:
    settings = about.settings
    stored = table.first_stored()
    layers, guesses = _layers(settings, stored, about.folder)
    mixture = _mixture(settings, table, layers, about.folder)
    places = table.places(mixture.size if mixture else None, layers)
    meanings = {key: meaning(key[0], key[1], stored.get, about.scheme) for key in table.rows}
    tensors = tuple(_tensor(key, row, places[key], meanings[key]) for key, row in table.rows.items())
    if not any(tensor.elements for tensor in tensors):
        raise CorruptModel(f"{about.folder} contains no weights", hint="the download may be incomplete")
    cache = layout(settings, layers, projections((key[0], key[1], places[key]) for key in table.rows))
    heads, kv_heads = declared_heads(settings)
    return Profile(
        name=about.name,
        format="safetensors",
        architecture=about.architecture,
        tensors=tensors,
        files=tuple(table.files),
        layers=layers,
        cache=cache.layers,
        experts=mixture.experts if mixture else None,
        embedding_length=settings.count("hidden_size", "n_embd", "d_model"),
        heads=heads,
        kv_heads=kv_heads or heads,
        training_context=declared_context(settings),
        tokenizer=tokenizer_in(about.folder, settings),
        quantisation=about.scheme.name or _commonest(tensors),
        guesses=(*guesses, *(mixture.guesses if mixture else ()), *_storage_doubts(table, meanings), *cache.guesses),
    )


def _tensor(key: tuple[str, StoredTensor], row: _Row, place: TensorRole, stands_for: Meaning) -> Tensor:
    name, stored = key
    shape = tuple(reversed(stored.shape))
    if place.cls is TensorClass.ROUTED_EXPERTS and len(shape) > 3:  # MXFP4 has additional dimensions for blocks
        shape = (prod(shape[:-2]), *shape[-2:])
    return Tensor(
        name=name,
        cls=place.cls,
        layer=place.layer,
        shape=(*shape, row.count) if "experts.*." in name else shape,
        type=stands_for.type,
        bytes=row.bytes,
        elements=stands_for.parameters * row.count,
        file=row.file,
        offset=row.offset,
    )


def _layers(settings: ConfigReader, stored: Mapping[str, StoredTensor], folder: Path) -> tuple[int, list[str]]:
    """Number of decoding layers, without later ones for multi-token prediction, and guesses."""
    declared = declared_layers(settings)
    guesses = []
    places = (classify_hf(name, kept.shape) for name, kept in stored.items())
    present = 1 + max((place.layer for place in places if place.layer is not None), default=-1)
    if settings.flag("is_encoder_decoder"):
        guesses.append("an encoder-decoder model: layers of both halves count, with a cache like a decoder's")
        declared = max(declared or 0, present)
    if declared is None:
        guesses.append("config.json has no number of layers, so they are counted by tensor names")
    elif declared > present:
        guesses.append(f"config.json has {declared} layers, but the tensors have {present}")
    elif declared < present and not settings.count("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        guesses.append(
            f"layers {declared} to {present - 1} count as multi-token prediction, because config.json has {declared}"
        )
    layers = declared or present
    if layers > MAX_LAYERS:
        raise CorruptModel(f"{folder} claims {layers} layers")
    return layers, guesses


@dataclass(frozen=True, slots=True)
class _Mixture:
    """Facts about the experts; `size` is 0 if their number is unknown."""

    size: int
    experts: Experts | None
    guesses: tuple[str, ...] = ()


def _mixture(settings: ConfigReader, table: _Table, layers: int, folder: Path) -> _Mixture | None:
    declared, used, shared = declared_experts(settings)
    shown = _stacked(table, declared, layers)
    if shown is None:
        return None
    size = shown or declared
    if size is None or used is None:
        doubt = "the number of experts per token is unknown, so every token counts as reading all experts"
        return _Mixture(size or 0, None, (doubt,))
    if used > size:
        raise CorruptModel(f"{folder / 'config.json'} claims to use {used} of {size} experts")
    if shared is None:
        shared = int(any(place.cls is TensorClass.SHARED_EXPERTS for place in table.places(size, layers).values()))
    differ = f"config.json has {declared} experts, but the tensors have {shown}, which counts"
    return _Mixture(size, Experts(size, used, shared), (differ,) if declared and declared != size else ())


def _stacked(table: _Table, declared: int | None, layers: int) -> int | None:
    """Number of experts per layer by separate tensors or the first dimension of a stack; None: no experts."""
    counts: dict[str, int] = {}
    for (name, kept), place in table.places(declared or 0, layers).items():
        if place.cls is TensorClass.ROUTED_EXPERTS:
            single = "experts.*." in name
            stacked = table.rows[name, kept].count if single else kept.shape[0] if len(kept.shape) > 2 else 0
            counts[name] = counts.get(name, 0) + stacked
    return max(counts.values(), default=None)


def _storage_doubts(table: _Table, meanings: Mapping[tuple[str, StoredTensor], Meaning]) -> list[str]:
    doubts = []
    strange = sorted({kept.dtype for _, kept in table.rows if kept.dtype not in DTYPE_BITS})
    if strange:
        doubts.append(f"type {', '.join(strange)} is unknown, so each number counts as one parameter")
    if any(item.guessed for item in meanings.values()):
        doubts.append("the number of weights per stored number is unknown, so 4 bits per weight are assumed")
    return doubts


def _commonest(tensors: Iterable[Tensor]) -> str | None:
    """The type of most weights, for models without a quantization scheme."""
    totals: dict[str, int] = {}
    for tensor in tensors:
        if tensor.elements:
            totals[tensor.type] = totals.get(tensor.type, 0) + tensor.bytes
    kind = max(totals, key=lambda name: totals[name], default=None)
    return None if kind is None else _TYPE_NAMES.get(kind, kind.lower())


def _folder_name(folder: Path) -> str:
    """The folder's name or, in a Hugging Face cache, where folders are named by commit, the repository's."""
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return folder.name
