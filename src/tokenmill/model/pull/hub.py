"""Downloads GGUFs with all their splits from a Hugging Face hub and resumes after interruptions.

huggingface_hub provides names, sizes, hashes, logins and `http_get`. Its `hf_hub_download` is not used, because it
discards partial downloads when interrupted, also over Xet (huggingface_hub#4196). Files over 50 GB, which the hub does
not send in one response, are requested in pieces. Bytes are hashed while they are written.
"""

import hashlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import urlsplit

from tokenmill.errors import ChecksumMismatch, PullError, UsageError
from tokenmill.model.pull.hub_errors import hub_errors
from tokenmill.model.pull.quants import FileSet, RemoteFile, choose, file_sets
from tokenmill.model.pull.store import (
    DownloadProgress,
    Notify,
    Pulled,
    check_space,
    disk_errors,
    drop_other_parts,
    is_whole,
    locked,
    part_of,
    pulled,
    write_note,
)
from tokenmill.storage.atomic import commit
from tokenmill.units import GIB, format_bytes

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo

MAX_RESPONSE_BYTES = 50 * 10**9
PIECE_BYTES = 32 * GIB
_HASH_BLOCK_BYTES = 4 << 20
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class WantedFiles:
    """A parsed `hf:REPO:QUANT`."""

    repo: str
    quant: str | None


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository at one commit: its models and the names of all files."""

    repo: str
    commit: str
    endpoint: str
    sets: tuple[FileSet, ...]
    files: frozenset[str]
    headers: dict[str, str] = field(repr=False)  # may contain a token

    def url(self, path: str) -> str:
        """The URL of one file."""
        from huggingface_hub import hf_hub_url  # noqa: PLC0415  slow to import

        return str(hf_hub_url(self.repo, path, revision=self.commit, endpoint=self.endpoint))


@dataclass(frozen=True, slots=True)
class HubOffer:
    """Files to download from one fixed commit."""

    name: str
    repo: str
    commit: str
    chosen: FileSet
    urls: tuple[str, ...]  # one per file
    headers: dict[str, str] = field(repr=False)  # may contain a token

    def folder(self, models_path: Path) -> Path:
        """The model's folder after the pull."""
        return models_path.joinpath(*self.repo.split("/"), self.chosen.label)

    def remaining_bytes(self, models_path: Path) -> int:
        """Bytes not yet downloaded."""
        return sum(_remaining(self, models_path, file) for file in self.chosen.files)


def parse(name: str) -> WantedFiles:
    """Parse `hf:REPO:QUANT` or `hf:REPO:FILE.gguf`. Raises `UsageError`."""
    repo, _, quant = name.removeprefix("hf:").partition(":")
    if not _REPO.fullmatch(repo):
        raise UsageError(
            f"{name!r} does not name a repository",
            hint="use hf:OWNER/REPO:QUANT, for example hf:unsloth/Kimi-K2.5-GGUF:Q4_K_S",
        )
    return WantedFiles(repo, quant.strip() or None)


def cached(wanted: WantedFiles, models_path: Path, *, verify: bool = False) -> Pulled | None:
    """The model if all its files are in the cache, else None; makes no request."""
    name = f"hf:{wanted.repo}:{wanted.quant}".casefold()
    found = [model for model in pulled(models_path) if model.complete and model.name.casefold() == name]
    if len(found) != 1:
        return None
    whole = all(is_whole(file, found[0].name, None, verify=verify) for file in found[0].files)
    return found[0] if whole else None


def query(wanted: WantedFiles, *, endpoint: str | None = None) -> HubOffer:
    """Query the hub for the files to download; `endpoint` defaults to HF_ENDPOINT, else the public hub."""
    return offer_of(repository(wanted, endpoint=endpoint), wanted)


def repository(wanted: WantedFiles, *, endpoint: str | None = None) -> Repository:
    """Query the hub for the files of a repository."""
    with hub_errors(wanted.repo):
        from huggingface_hub import HfApi  # noqa: PLC0415  optional, slow to import
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # noqa: PLC0415

        api = HfApi(endpoint=endpoint, library_name="tokenmill")
        _check_endpoint(api.endpoint)
        info = _model_info(api, wanted.repo)
        siblings = info.siblings or ()
        return Repository(
            repo=wanted.repo,
            commit=info.sha or "main",
            endpoint=api.endpoint,
            sets=file_sets(
                RemoteFile(sibling.rfilename, sibling.size, sibling.lfs.sha256 if sibling.lfs else None)
                for sibling in siblings
                if sibling.size is not None
            ),
            files=frozenset(sibling.rfilename for sibling in siblings),
            headers=build_hf_headers(library_name="tokenmill"),
        )


def offer_of(found: Repository, wanted: WantedFiles) -> HubOffer:
    """The files of a repository that were asked for. Raises as `choose` does."""
    chosen = choose(wanted.repo, found.sets, wanted.quant)
    _check_names(wanted.repo, chosen)
    unique = sum(item.label == chosen.label for item in found.sets) == 1
    return HubOffer(
        name=f"hf:{wanted.repo}:{chosen.label if unique else chosen.files[0].path}",
        repo=wanted.repo,
        commit=found.commit,
        chosen=chosen,
        urls=tuple(found.url(file.path) for file in chosen.files),
        headers=found.headers,
    )


def published_hashes(repo: str, *, endpoint: str | None = None) -> dict[str, tuple[str, ...]]:
    """The hashes of a repository's files by file name; several if folders contain files of the same name."""
    with hub_errors(repo):
        from huggingface_hub import HfApi  # noqa: PLC0415  optional, slow to import

        api = HfApi(endpoint=endpoint, library_name="tokenmill")
        _check_endpoint(api.endpoint)
        found: dict[str, tuple[str, ...]] = {}
        for sibling in _model_info(api, repo).siblings or ():
            if sibling.lfs is not None:
                name = PurePosixPath(sibling.rfilename).name
                found[name] = (*found.get(name, ()), sibling.lfs.sha256)
        return found


def _model_info(api: "HfApi", repo: str) -> "ModelInfo":
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # noqa: PLC0415

    try:
        return api.model_info(repo, files_metadata=True, timeout=60)
    except (HfHubHTTPError, HFValidationError):
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PullError(
            f"the response of {api.endpoint} is not that of a hub", hint="check HF_ENDPOINT and the proxy settings"
        ) from error


def download(
    offer: HubOffer, models_path: Path, *, keep_free_bytes: int, progress: DownloadProgress, notify: Notify
) -> Pulled:
    """Download all missing files."""
    folder = offer.folder(models_path)
    total_bytes = offer.chosen.bytes
    check_space(offer.name, folder, offer.remaining_bytes(models_path), keep_free_bytes)
    with locked(folder, offer.name, notify), hub_errors(offer.repo), disk_errors(folder):
        done = downloaded = fetched = 0
        for file, url in zip(offer.chosen.files, offer.urls, strict=True):

            def report(file_bytes: int, before: int = done) -> None:
                progress(before + file_bytes, total_bytes)

            if not is_whole(folder / file.name, offer.name, file.sha256):
                fetched += _download(offer, file, url, folder, report=report, notify=notify)
                downloaded += 1
            done += file.bytes
            progress(done, total_bytes)
    paths = tuple(folder / file.name for file in offer.chosen.files)
    return Pulled(offer.name, paths[0], paths, total_bytes, was_here=not downloaded, fetched_bytes=fetched)


def _download(
    offer: HubOffer, file: RemoteFile, url: str, folder: Path, *, report: Callable[[int], None], notify: Notify
) -> int:
    """Download and check one file; return the number of bytes downloaded."""
    path = folder / file.name
    part_path = part_of(path, _identity(offer, file))
    drop_other_parts(path, part_path)
    with _Part(part_path, file.bytes, report, notify) as part:
        had = part.tell()
        while part.tell() < file.bytes:
            _next_piece(url, offer.headers, part, file.bytes)
        found = part.sha256()
    if found != (file.sha256 or found):
        part_path.unlink()
        raise ChecksumMismatch(
            f"{file.path} of {offer.repo} was downloaded with sha256 {found} instead of {file.sha256}",
            hint="it was removed; pull again",
        )
    commit(part_path, path)
    write_note(path, offer.name, found, published=file.sha256 is not None)
    return file.bytes - had


def _next_piece(url: str, headers: dict[str, str], part: "_Part", size_bytes: int) -> None:
    """Request the rest of the file, or the next piece of a large file."""
    from huggingface_hub.file_download import http_get  # noqa: PLC0415

    have = part.tell()
    if size_bytes <= MAX_RESPONSE_BYTES:
        resume_bytes = have
        expected_bytes = size_bytes
    else:
        end = min(have + PIECE_BYTES, size_bytes)
        headers = headers | {"Range": f"bytes={have}-{end - 1}"}
        resume_bytes = 0
        expected_bytes = end - have
    http_get(
        url,
        cast("Any", part),
        resume_size=resume_bytes,
        headers=headers,
        expected_size=expected_bytes,
        displayed_filename=part.name,
        _tqdm_bar=cast("Any", _NoBar()),
    )


class _Part:
    """A part file that hashes all written bytes; has the file methods that `http_get` uses."""

    def __init__(self, path: Path, size_bytes: int, report: Callable[[int], None], notify: Notify) -> None:
        self.name = path.name
        self._report = report
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        have = self._file.seek(0, io.SEEK_END)
        if have > size_bytes:
            have = self._file.truncate(0)
        if have:
            notify(f"resuming at {format_bytes(have)} of {path.name.rpartition('.part')[0].rpartition('.')[0]}")
        self._hash_again()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        """Append bytes."""
        view = memoryview(data)
        while view:
            count = self._file.write(view)
            self._sha256.update(view[:count])
            view = view[count:]
        self._report(self._file.tell())
        return len(data)

    def tell(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def seek(self, offset: int) -> int:
        """Seek back after the server restarted from an earlier offset."""
        return self._file.seek(offset)

    def truncate(self) -> None:
        """Discard the bytes after the current position."""
        self._file.truncate()
        self._hash_again()

    def sha256(self) -> str:
        """Hash of all bytes so far."""
        return self._sha256.hexdigest()

    def _hash_again(self) -> None:
        self._sha256 = hashlib.sha256()
        self._file.seek(0)
        while piece := self._file.read(_HASH_BLOCK_BYTES):
            self._sha256.update(piece)


class _NoBar:
    """A progress bar for `http_get` that shows nothing; `_Part` reports progress."""

    def update(self, count: float | None = 1) -> None:
        """Ignore the call."""


def _remaining(offer: HubOffer, models_path: Path, file: RemoteFile) -> int:
    path = offer.folder(models_path) / file.name
    if path.exists():
        return 0
    part = part_of(path, _identity(offer, file))
    return max(0, file.bytes - part.stat().st_size) if part.exists() else file.bytes


def _identity(offer: HubOffer, file: RemoteFile) -> str:
    return file.sha256 or hashlib.sha256(f"{offer.commit} {file.path}".encode()).hexdigest()


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"HF_ENDPOINT must be an http(s) URL (got {endpoint!r})", hint="use https://HOST")


def _check_names(repo: str, chosen: FileSet) -> None:
    """Reject names from the server that could escape the folder or mislead a terminal."""
    for path in (chosen.label, *(file.path for file in chosen.files)):
        if not path.isprintable() or any(step.startswith(".") for step in path.split("/")):
            raise PullError(f"{repo} contains an unsafe file name: {path!r}")
