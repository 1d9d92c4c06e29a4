"""Models by name, such as `kimi-k2.5:Q4_K_S`, without a file.

Each file in entries/ describes a family: the fields of its published config.json, the source of the figures, and the
models that share it, each with the fields that differ. `conversion` makes GGUF keys of the fields.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from tokenmill.decode import decode
from tokenmill.errors import UnknownModel
from tokenmill.model import description
from tokenmill.model.conversion.convert import convert
from tokenmill.model.description import GHOST_KEY, Description, Mix, VocabularyFacts
from tokenmill.model.gguf import GgufHeader, is_url
from tokenmill.model.gguf_write import Encoded

__all__ = ["GHOST_KEY", "CatalogEntry", "entry", "header", "names", "resolve"]

_ENTRIES = resources.files("tokenmill.model") / "entries"
_NAME = re.compile(r"[\w.-]+(:[\w.-]+)?(@[\w.]+)?")
_FILES = (".gguf", ".safetensors", ".json")


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One model of a family, as in the file."""

    title: str
    parameters: str  # the published total without prediction layers, such as 1.6T
    repository: str | None = None  # on the Hugging Face Hub, with GGUF files of llama-quantize's mixes
    repositories: dict[str, str] = field(default_factory=dict)  # of other quantizations
    sources: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)  # fields that differ from the family's
    listed: tuple[str, ...] = ()
    mixes: dict[str, Mix] = field(default_factory=dict)  # in addition to the family's


@dataclass(frozen=True, slots=True)
class CatalogFamily:
    """One file of the catalogue."""

    sources: tuple[str, ...]
    config: dict[str, Any]  # the published config.json
    words: VocabularyFacts
    models: dict[str, CatalogModel]
    listed: tuple[str, ...] = ("Q4_K_M", "Q8_0")  # quantizations shown in lists; the others can be requested, too
    mixes: dict[str, Mix] = field(default_factory=dict)
    pinned: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One model of the catalogue."""

    name: str
    model: Description
    sources: tuple[str, ...]
    listed: tuple[str, ...]
    parameters: str
    aliases: tuple[str, ...]
    repository: str | None
    repositories: Mapping[str, str]


@cache
def _index() -> Mapping[str, str]:
    """Name or alias of each model -> family, without the checks that take most of the time."""
    found: dict[str, str] = {}
    for path in sorted(_ENTRIES.iterdir(), key=lambda path: path.name):
        if path.name.endswith(".toml"):
            for name, model in _raw(path.name).get("models", {}).items():
                found |= dict.fromkeys((name, *model.get("aliases", ())), path.name)
    return found


@cache
def _raw(file: str) -> dict[str, Any]:
    return tomllib.loads((_ENTRIES / file).read_text(encoding="utf-8"))


@cache
def _family(file: str) -> CatalogFamily:
    return decode(CatalogFamily, _raw(file), where=file)


def names() -> tuple[str, ...]:
    """All model names of the catalogue, sorted."""
    return tuple(sorted(name for file in dict.fromkeys(_index().values()) for name in _raw(file)["models"]))


def listed() -> tuple[str, ...]:
    """All `model:quant` names to list."""
    return tuple(f"{name}:{quant}" for name in names() for quant in entry(name).listed)


def known(name: str) -> bool:
    """Whether a name, without a quantization, is that of a model or an alias."""
    return name.lower() in _index()


@cache
def entry(name: str) -> CatalogEntry:
    """The entry of a model or alias. Raises `UnknownModel`."""
    file = _index().get(name)
    if file is None:
        near = difflib.get_close_matches(name, _index(), n=5)
        hint = f"did you mean {' or '.join(near)}? tokenmill models list lists all" if near else ""
        raise UnknownModel(
            f"no model {name!r} in the catalogue, and no such file",
            hint=hint or f"the catalogue has {', '.join(names())}",
        )
    family = _family(file)
    own = next(key for key, model in family.models.items() if name == key or name in model.aliases)
    model = family.models[own]
    converted = convert({**family.config, **model.config}, f"the entry of {own}")
    return CatalogEntry(
        name=own,
        model=Description(
            title=model.title,
            architecture=converted.architecture,
            keys=converted.keys,
            words=family.words,
            extras=converted.extras,
            mixes={**family.mixes, **model.mixes},
            pinned=family.pinned,
        ),
        sources=(*model.sources, *family.sources),
        listed=model.listed or family.listed,
        parameters=model.parameters,
        aliases=model.aliases,
        repository=model.repository,
        repositories=model.repositories,
    )


def resolve(name: str) -> tuple[str, str]:
    """Normalize `Kimi-K2.5:q4_k_s` to (`kimi-k2.5`, `Q4_K_S`). Raises `UnknownModel`."""
    model, colon, quant = name.partition(":")
    found = entry(model.lower())
    if not colon or not quant:
        hint = f"for example {found.name}:{found.listed[0]}; others are {', '.join(found.listed[1:])}"
        raise UnknownModel(f"{found.name} needs a quantization", hint=hint)
    return found.name, found.model.quant(quant, found.name)


def pull_hint(model: str) -> str:
    """What to run to download a model."""
    base, _, quant = model.partition(":")
    if is_url(model):
        return "download the file, or pull the model as hf:OWNER/REPO:QUANT"
    if not looks_like_name(model) and not model.startswith("hf:"):  # a config.json
        return "give the model's files; tokenmill models pull hf:OWNER/REPO:QUANT downloads them"
    if known(base):
        return f"tokenmill models pull hf:{_repository(base.lower(), quant)}:{quant or 'QUANT'}"
    return f"tokenmill models pull {model}"


def _repository(name: str, quant: str) -> str:
    """The repository of a model's quantization; a placeholder if the catalogue does not know one."""
    found = entry(name)
    own = next((mix for mix in found.model.mixes if mix.lower() == quant.lower()), None)
    return (found.repository if own is None else found.repositories.get(own)) or "OWNER/REPO"


def looks_like_name(text: str) -> bool:
    """Whether a text has the form of a catalogue name rather than of a path."""
    return _NAME.fullmatch(text) is not None and not text.partition(":")[0].lower().endswith(_FILES)


def header(name: str, *, words: bool = True) -> GgufHeader:
    """The header of a model, without the key that marks ghosts; see `description.header`."""
    model, quant = resolve(name)
    return description.header(entry(model).model, quant, f"{model}:{quant}", words=words)


def encoded(name: str) -> Encoded:
    """The encoded header of a model's ghost file."""
    model, quant = resolve(name)
    return description.encoded(entry(model).model, quant, f"{model}:{quant}")
