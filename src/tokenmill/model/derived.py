"""Models derived from a published config.json, on this machine or on a server, without any weights.

A reference is the path or URL of a config.json, or a folder with one and without weights, each with an optional
quantization: `config.json`, `kimi/config.json:Q4_K_M`, `https://HOST/PATH/config.json:Q8_0`, `kimi-folder:IQ4_XS`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from tokenmill.errors import CorruptModel, RemoteError
from tokenmill.model.conversion.convert import convert
from tokenmill.model.describe import describe
from tokenmill.model.description import Description, VocabularyFacts, encoded, header
from tokenmill.model.gguf import is_url
from tokenmill.model.gguf_write import Encoded
from tokenmill.model.huggingface.config import read_object
from tokenmill.model.profile import Profile
from tokenmill.units import format_bytes

DEFAULT_QUANT = "Q4_K_M"  # that of llama.cpp's -hf
_CONFIG = "config.json"
_MAX_BYTES = 4 << 20  # the longest configs have a few hundred kilobytes
_GUESS = "names, shapes and types of tensors are derived from config.json by the rules of llama.cpp"


@dataclass(frozen=True, slots=True)
class ConfigReference:
    """Where a config.json is, and the quantization to derive."""

    where: str  # a path or a URL
    quant: str | None

    @property
    def name(self) -> str:
        """The model's name: that of the folder."""
        folder = Path(self.where).parent if is_url(self.where) else Path(self.where).resolve().parent
        return folder.name or self.where


def reference(text: str) -> ConfigReference | None:
    """Parse a reference; None if the text is none. A folder with weights is one only with a quantization."""
    if is_url(text):
        base, colon, quant = text.rpartition(":")
        if colon and base.endswith(_CONFIG):
            return ConfigReference(base, quant or None)
        return ConfigReference(text, None) if text.partition("?")[0].endswith(_CONFIG) else None
    if (found := _file(Path(text))) is not None:
        return ConfigReference(found, None)
    base, colon, quant = text.rpartition(":")
    if not colon or not base:
        return None
    path = Path(base)
    found = str(path / _CONFIG) if (path / _CONFIG).is_file() else _file(path)
    return None if found is None else ConfigReference(found, quant or None)


def _file(path: Path) -> str | None:
    """The config of a path that names one or is a folder without weights."""
    try:
        if path.name == _CONFIG and path.is_file():
            return str(path)
        if (path / _CONFIG).is_file() and not any(path.glob("*.gguf")) and not any(path.glob("*.safetensors*")):
            return str(path / _CONFIG)
    except OSError:  # a name that is too long, a folder without permission
        return None
    return None


def read_config(found: ConfigReference, headers: dict[str, str] | None = None) -> Profile:
    """The profile of a reference. Raises `ModelError` and its subclasses, or `UnknownModel`."""
    return profile(_load(found, headers), found.quant, found.name, found.where)


def encoded_config(found: ConfigReference) -> Encoded:
    """The encoded header of a ghost of a reference."""
    model = description(_load(found, None), found.name, found.where)
    quant = model.quant(found.quant or DEFAULT_QUANT, found.name)
    return encoded(model, quant, f"{found.where}:{quant}")


def profile(config: Mapping[str, Any], quant: str | None, name: str, source: str) -> Profile:
    """The profile of a config in one quantization; `source` names it in errors."""
    model = description(config, name, source)
    chosen = model.quant(quant or DEFAULT_QUANT, name)
    found = describe((header(model, chosen, f"{name}:{chosen}", words=False),), format="catalog")
    guesses = (_GUESS,) if quant else (_GUESS, f"no quantization was given, so {DEFAULT_QUANT} is assumed")
    tokenizer = replace(found.tokenizer, tokens=model.words.tokens)
    return replace(found, tokenizer=tokenizer, guesses=(*guesses, *found.guesses))


def description(config: Mapping[str, Any], name: str, source: str) -> Description:
    """Describe the model of a config."""
    converted = convert(config, source)
    tokens = int(str(converted.keys["vocab_size"]))
    return Description(name, converted.architecture, converted.keys, VocabularyFacts(tokens), converted.extras)


def parse_config(raw: bytes, source: str) -> dict[str, Any]:
    """Parse a downloaded config.json. Raises `CorruptModel`."""
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        raise CorruptModel(f"{source} is not valid JSON", hint="check the URL: it may be a web page") from None
    if not isinstance(value, dict):
        raise CorruptModel(f"{source} is not a JSON object", hint="check the URL")
    return value


def _load(found: ConfigReference, headers: dict[str, str] | None) -> dict[str, Any]:
    if not is_url(found.where):
        return read_object(Path(found.where))
    return parse_config(download_config(found.where, headers), found.where)


def download_config(url: str, headers: dict[str, str] | None) -> bytes:
    """Download a small file. Raises `RemoteError`."""
    try:
        with (
            httpx.Client(headers=headers, follow_redirects=True, timeout=30) as client,
            client.stream("GET", url) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise RemoteError(f"{url}: the server answered {response.status_code}", hint=_hint(response))
            body = bytearray()
            for piece in response.iter_bytes():
                body += piece
                if len(body) > _MAX_BYTES:
                    raise RemoteError(f"{url} is larger than {format_bytes(_MAX_BYTES)}", hint="check the URL")
            return bytes(body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise RemoteError(f"cannot read {url}: {reason}", hint="check the URL and the network") from error


def _hint(response: httpx.Response) -> str:
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return "accept the terms on the model's page if there are any, then set HF_TOKEN or run: hf auth login"
    return "check the URL"
