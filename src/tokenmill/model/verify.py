"""Compares the files of a model with their published hashes and checks that their structure is complete.

`files_of` finds the files, `published` their hashes, `verify` reads and compares them. Published hashes come from, in
this order: the caller (a hash, or a Hugging Face repository), the hashes pinned in this package, the record that
`tokenmill models pull` keeps next to a file, the names of files in the Hugging Face cache, and the hub's metadata for
a file that was pulled without a hash. Files are never changed or removed.
"""

import errno
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenmill.errors import CorruptModel, MissingSplit, ModelError, PullError, UnknownModel, UsageError
from tokenmill.model import gguf
from tokenmill.model.huggingface import safetensors_header
from tokenmill.model.huggingface.safetensors import shards_in
from tokenmill.model.pull import hub
from tokenmill.model.pull.store import DownloadProgress, read_note, sha256_of, split_of
from tokenmill.model.pull.wheel import WHEELS

VerifyVerdict = Literal["ok", "wrong", "unknown"]
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REPORT_BYTES = 16 << 20  # between two progress reports
_NOT_DAMAGE = frozenset((errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM))


@dataclass(frozen=True, slots=True)
class Published:
    """The published hashes of one file, or the reason why none is known."""

    hashes: tuple[str, ...] = ()  # the file must have one of them; empty: no hash is known
    source: str | None = None
    reason: str | None = None  # why no hash is known
    official: bool = True  # False: recorded at download, but not published by the source


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """The result for one file."""

    path: Path
    bytes: int | None  # None: the file is missing or unreadable
    verdict: VerifyVerdict
    sha256: str | None  # None: the file could not be read to its end
    published_sha256: tuple[str, ...]
    source: str | None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class VerifiedModel:
    """The result for a model."""

    files: tuple[CheckedFile, ...]
    structure: str | None  # the fault of the set of files; None: complete

    @property
    def verdict(self) -> VerifyVerdict:
        """`wrong` if a file or the set of files is wrong, `ok` only if every file is."""
        verdicts = {file.verdict for file in self.files}
        if self.structure is not None or "wrong" in verdicts:
            return "wrong"
        return "unknown" if "unknown" in verdicts else "ok"


def files_of(where: Path) -> tuple[Path, ...]:
    """All files of a model, including missing splits; `where` is a GGUF (any split), a safetensors file or a folder.

    Raises `UnknownModel` if there is no such model or the folder contains several.
    """
    if where.is_dir():
        first_splits = [file for file in sorted(where.glob("*.gguf")) if split_of(file.name)[1] == 1]
        if len(first_splits) > 1:
            raise UnknownModel(
                f"{where} contains {len(first_splits)} models", hint=f"give one of them, for example {first_splits[0]}"
            )
        return files_of(first_splits[0]) if first_splits else tuple(shards_in(where, None))
    if not where.exists():
        raise UnknownModel(f"{where} does not exist", hint="give a file, a folder, or the name of a pulled model")
    if where.suffix == ".safetensors":
        return tuple(shards_in(where.parent, where))
    stem, _, count = split_of(where.name)
    if count == 1:
        return (where,)
    return tuple(where.with_name(f"{stem}-{index:05}-of-{count:05}{where.suffix}") for index in range(1, count + 1))


def published(files: Sequence[Path], *, sha256: str | None = None, repo: str | None = None) -> dict[Path, Published]:
    """The published hashes of each file.

    `sha256` is the hash of a single file; `repo` (OWNER/REPO) replaces all recorded hashes. Raises `UsageError` if they
    cannot be used and `PullError` if the hub does not answer for `repo`.
    """
    if sha256 is not None:
        if not _SHA256.fullmatch(sha256.lower()):
            raise UsageError(f"--sha256 must be 64 hexadecimal digits (got {sha256!r})")
        if len(files) != 1:
            raise UsageError(
                f"--sha256 applies to a single file, but this model has {len(files)}",
                hint="give one of its files, or compare all of them with --repo OWNER/REPO",
            )
        return {files[0]: Published((sha256.lower(),), "--sha256")}
    if repo is not None:
        return _from_hub(files, repo)
    return {file: _recorded(file) for file in files}


def _recorded(file: Path) -> Published:
    """The hash recorded on this machine; queries the hub only for a file that was pulled without one."""
    note = read_note(file)
    pinned = WHEELS.get(note.name) if note is not None else None
    if pinned is not None:
        return Published((pinned.sha256,), f"pinned in tokenmill for {pinned.requirement}")
    if note is not None and note.sha256 is not None and note.published:
        return Published((note.sha256,), f"recorded when {note.name} was pulled")
    target = file.resolve()
    if target.parent.name == "blobs" and _SHA256.fullmatch(target.name):  # file names in the cache are hashes
        return Published((target.name,), "name of the file in the Hugging Face cache")
    if note is None or not note.name.startswith("hf:"):
        return Published(reason="no published hash is known for this file")
    try:
        found = _from_hub((file,), hub.parse(note.name).repo)[file]
    except (PullError, UsageError) as error:
        found = Published(reason=f"it was pulled without a published hash, and the hub fails: {error.message}")
    if found.hashes or note.sha256 is None:
        return found
    return Published((note.sha256,), "computed when it was downloaded", found.reason, official=False)


def _from_hub(files: Sequence[Path], repo: str) -> dict[Path, Published]:
    known = hub.published_hashes(repo)
    found = {}
    for file in files:
        hashes = known.get(file.name, ())
        reason = None if hashes else f"{repo} has no published hash for a file of this name"
        found[file] = Published(hashes, f"metadata of hf:{repo}" if hashes else None, reason)
    return found


def verify(
    expected: Mapping[Path, Published], *, progress: DownloadProgress = lambda _done, _total: None
) -> VerifiedModel:
    """Read all files completely and compare their hashes; `progress` receives bytes read and total bytes."""
    sizes = {file: file.stat().st_size if file.is_file() else 0 for file in expected}
    total = sum(sizes.values())
    done = reported = 0

    def read(count: int) -> None:
        nonlocal done, reported
        done += count
        if done - reported >= _REPORT_BYTES or done == total:
            reported = done
            progress(done, total)

    checked = tuple(_check(file, known, read) for file, known in expected.items())
    single_faults = any(file.verdict == "wrong" for file in checked)
    return VerifiedModel(checked, None if single_faults else _set_fault(tuple(expected)))


def _check(file: Path, known: Published, read: Callable[[int], None]) -> CheckedFile:
    if not file.is_file():
        return CheckedFile(file, None, "wrong", None, known.hashes, known.source, "the file is missing")
    try:
        found = sha256_of(file, read)
        size_bytes = file.stat().st_size
    except OSError as error:
        unreadable: VerifyVerdict = "unknown" if error.errno in _NOT_DAMAGE else "wrong"
        detail = f"cannot be read: {error.strerror or error}"
        return CheckedFile(file, None, unreadable, None, known.hashes, known.source, detail)
    verdict, reason = _verdict(found, known)
    fault = _file_fault(file)
    if fault is not None:
        verdict = "wrong"
        reason = fault
    return CheckedFile(file, size_bytes, verdict, found, known.hashes, known.source, reason)


def _verdict(found: str, known: Published) -> tuple[VerifyVerdict, str | None]:
    if not known.hashes:
        return "unknown", known.reason
    if found not in known.hashes:
        return "wrong", "sha256 differs from the published one" if known.official else "changed since its download"
    if not known.official:
        return "unknown", f"unchanged since its download, but {known.reason}"
    return "ok", None


def _file_fault(file: Path) -> str | None:
    """The structural fault of one file, such as tensors beyond its end; None if there is none."""
    try:
        if file.suffix == ".safetensors":
            safetensors_header.read_header(file, split=True)
        else:
            gguf.read_header(file)
    except (CorruptModel, MissingSplit) as error:
        return error.message
    except ModelError:  # an unsupported version does not mean damage
        return None
    return None


def _set_fault(files: Sequence[Path]) -> str | None:
    """A fault of the files as a set, such as splits of two models; None if no fault was found."""
    one_of_several = len(files) == 1 and split_of(files[0].name)[2] > 1
    if one_of_several or files[0].suffix == ".safetensors":
        return None
    try:
        gguf.read_headers(files[0])
    except (CorruptModel, MissingSplit) as error:
        return error.message
    except ModelError:
        return None
    return None
