"""`tokenmill models verify`: compares the files of a model with their published hashes."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tokenmill.api.planning.plan import locate
from tokenmill.cli.output import Common, byte_report, harmless, say, show_json, show_text
from tokenmill.model.verify import CheckedFile, VerifiedModel, files_of, published
from tokenmill.model.verify import verify as check
from tokenmill.units import format_bytes, format_seconds, number_of

_EXIT_CODES = {"ok": 0, "wrong": 1, "unknown": 2}
_UNKNOWN_HINT = (
    "hint: compare with a Hugging Face repository (--repo OWNER/REPO) or with a known hash (--sha256 HEX); "
    "tokenmill models pull records the published hashes of its downloads"
)
_WRONG_HINT = "hint: nothing was removed; delete the wrong files and download them again"


def verify(
    model: str,
    /,
    *,
    sha256: Annotated[str | None, Parameter(metavar="HEX")] = None,
    repo: Annotated[str | None, Parameter(metavar="REPO")] = None,
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Compare the files of a model with their published hashes.

    Reads all splits completely, and checks that headers and tensors are complete. Changes nothing. Exit code 0: every
    file is as published; 1: a file is wrong or missing; 2: the published hash of a file is unknown.

        tokenmill models verify kimi-00001-of-00012.gguf --repo unsloth/Kimi-K2.5-GGUF

    Parameters
    ----------
    model
        GGUF file (any split), safetensors file or folder, or name of a downloaded model.
    sha256
        Compare one file with this hash; other splits are not read.
    repo
        Compare with the current hashes in a Hugging Face repository, OWNER/REPO, by file name. [default: the hashes
        recorded by `tokenmill models pull`]
    """
    path = Path(locate(model, common.load_config()))
    files = (path,) if sha256 is not None and path.is_file() else files_of(path)
    expected = published(files, sha256=sha256, repo=None if repo is None else repo.removeprefix("hf:"))
    began_s = time.monotonic()
    with byte_report("verifying") as progress:
        checked = check(expected, progress=progress)
    seconds = time.monotonic() - began_s
    if common.json:
        show_json(_document(model, checked, seconds))
    else:
        lines = [line for file in checked.files for line in _lines(file)]
        show_text(harmless("\n".join([*lines, *_summary(checked, seconds)])))
        if checked.verdict != "ok":
            say(_WRONG_HINT if checked.verdict == "wrong" else _UNKNOWN_HINT)
    return _EXIT_CODES[checked.verdict]


def _lines(file: CheckedFile) -> Iterator[str]:
    """The lines on one file; not a table, because tables fold hashes."""
    size = "" if file.bytes is None else f" ({format_bytes(file.bytes)})"
    yield f"{file.verdict}: {file.path}{size}"
    if file.detail is not None:
        yield f"  {file.detail}"
    if file.sha256 is not None and file.verdict != "ok":
        yield f"  sha256    {file.sha256}"
    if file.verdict == "wrong":
        yield from (f"  published {sha256}" for sha256 in file.published_sha256)
    if file.source is not None:
        yield f"  compared with: {file.source}"


def _summary(checked: VerifiedModel, seconds: float) -> list[str]:
    read_bytes = sum(file.bytes or 0 for file in checked.files)
    rate = f"{format_bytes(round(read_bytes / seconds))}/s" if seconds > 0 else "unknown rate"
    lines = [
        f"{number_of(len(checked.files), 'file')}, {format_bytes(read_bytes)} in {format_seconds(seconds)} ({rate})"
    ]
    if checked.structure is not None:
        lines.append(f"wrong: {checked.structure}")
    unknown = sum(file.verdict == "unknown" for file in checked.files)
    if checked.verdict == "ok":
        lines.append("ok: every file is as published")
    elif checked.verdict == "unknown":
        lines.append(f"unknown: {number_of(unknown, 'file')} could not be compared with a published hash")
    return lines


def _document(model: str, checked: VerifiedModel, seconds: float) -> dict[str, Any]:
    return {
        "model": model,
        "verdict": checked.verdict,
        "structure": checked.structure,
        "files": checked.files,
        "seconds": round(seconds, 3),
    }
