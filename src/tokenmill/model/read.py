"""Reads a `Profile` from a path, a URL or a catalogue name."""

from dataclasses import replace
from pathlib import Path

from tokenmill.errors import ModelError, UnknownModel
from tokenmill.model import catalog, derived
from tokenmill.model.describe import describe
from tokenmill.model.gguf import is_url, read_headers
from tokenmill.model.huggingface.safetensors import read_folder
from tokenmill.model.profile import Profile
from tokenmill.model.sources import UNREADABLE


def read(where: str | Path, *, headers: dict[str, str] | None = None) -> Profile:
    """Read a GGUF (any split, or an http(s) URL), a folder of safetensors, a config.json, or a catalogue entry.

    A model of a Hugging Face repository, `hf:OWNER/REPO:QUANT`, is read from its headers or its config.json.
    `headers` are sent with HTTP requests. Raises `UnknownModel` if there is no such model, and other errors of
    `tokenmill.errors.ModelError` if it cannot be read.
    """
    if (config := derived.reference(str(where))) is not None:
        return derived.read_config(config, headers)
    if str(where).startswith("hf:"):
        from tokenmill.model.pull.preview import preview  # noqa: PLC0415  imports an HTTP client

        return preview(str(where))
    if is_url(where):
        return describe(read_headers(where, headers))
    if not str(where) or "://" in str(where):
        raise UnknownModel(f"{str(where)!r} is not a model", hint="give a file, a folder, an http(s) URL, or a name")
    try:
        return _read_path(Path(where), str(where))
    except OSError as error:  # a folder without permission, a name that is too long
        raise ModelError(f"cannot read {where}: {error.strerror}", hint=UNREADABLE) from error


def _read_path(path: Path, name: str) -> Profile:
    if path.is_dir():
        return _read_directory(path)
    if path.suffix == ".safetensors" and path.is_file():
        return read_folder(path)
    if not path.exists() and catalog.looks_like_name(name):
        _, quant = catalog.resolve(name)
        return replace(describe((catalog.header(name),), format="catalog"), quantisation=quant)
    return describe(read_headers(path))


def _read_directory(path: Path) -> Profile:
    ggufs = sorted(item for item in path.glob("*.gguf") if "-of-" not in item.name or "-00001-of-" in item.name)
    if len(ggufs) == 1:
        return describe(read_headers(ggufs[0]))
    if len(ggufs) > 1:
        raise UnknownModel(f"{path} contains {len(ggufs)} models", hint=f"give one of them, for example {ggufs[0]}")
    if any(path.glob("*.safetensors*")) or (path / "config.json").is_file():
        return read_folder(path)
    raise UnknownModel(f"{path} contains no GGUF or safetensors files", hint="give the model's file or its folder")
