"""Reads a `Profile` from a path, a URL or a catalogue name."""

import math
import re
from dataclasses import replace
from pathlib import Path

from tokenmill.errors import ModelError, UnknownModel
from tokenmill.model import catalog, derived
from tokenmill.model.describe import describe
from tokenmill.model.gguf import is_url, read_headers
from tokenmill.model.huggingface.safetensors import read_folder
from tokenmill.model.profile import Profile
from tokenmill.model.resize import resized
from tokenmill.model.sources import UNREADABLE
from tokenmill.units import parse_bytes

SIZED_QUANTS = ("IQ1_S", "IQ2_XXS", "Q2_K", "IQ3_XXS", "Q3_K_M", "Q4_K_S", "Q5_K_S", "Q6_K", "Q8_0", "BF16")
"""Quantizations whose types a model of a stated size can have; the nearest in size is taken."""


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
        name, at, size = name.partition("@")
        if at:
            return _of_size(name, size)
        _, quant = catalog.resolve(name)
        return replace(describe((catalog.header(name),), format="catalog"), quantisation=quant)
    return describe(read_headers(path))


def _of_size(name: str, size: str) -> Profile:
    """A catalogue model of a stated size, such as 219GiB or 2.8bpw, with the types of the nearest quantization."""
    bits = re.fullmatch(r"([\d.]+)bpw", size, re.IGNORECASE)
    base, _, quant = name.partition(":")
    known = [f"{base}:{one}" for one in ([quant] if quant else SIZED_QUANTS)]
    profiles = [replace(describe((catalog.header(one),), format="catalog"), quantisation=size) for one in known]
    try:
        wanted = round(float(bits[1]) * profiles[0].parameters / 8) if bits else parse_bytes(size)
        return resized(min(profiles, key=lambda found: abs(math.log(found.bytes / max(wanted, 1)))), wanted)
    except ValueError as error:
        hint = f"for example {base}@219GiB, {base}@4.5bpw, or {base}:Q4_K_M@380GiB"
        raise UnknownModel(f"{name} cannot have the size {size!r}", hint=hint) from error


def _read_directory(path: Path) -> Profile:
    ggufs = sorted(item for item in path.glob("*.gguf") if "-of-" not in item.name or "-00001-of-" in item.name)
    if len(ggufs) == 1:
        return describe(read_headers(ggufs[0]))
    if len(ggufs) > 1:
        raise UnknownModel(f"{path} contains {len(ggufs)} models", hint=f"give one of them, for example {ggufs[0]}")
    if any(path.glob("*.safetensors*")) or (path / "config.json").is_file():
        return read_folder(path)
    raise UnknownModel(f"{path} contains no GGUF or safetensors files", hint="give the model's file or its folder")
