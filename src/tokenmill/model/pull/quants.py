"""Chooses the files of a repository for the name of a quantization. Pure."""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from tokenmill.errors import MissingSplit, UnknownModel, UsageError
from tokenmill.model.pull.store import split_of
from tokenmill.units import format_bytes

# quantizations at the end of file names: Q4_K_M, IQ2_XXS, UD-Q4_K_XL, TQ1_0, MXFP4_MOE, BF16, f16
_QUANT = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d+[A-Z0-9_]*|TQ\d_\d|(?:MX|NV)FP4[A-Z0-9_]*|BF16|FP?16|FP?32|FP8|INT[48]))$",
    re.IGNORECASE,
)
_NOT_MODELS = ("mmproj", "imatrix")  # projectors and calibration data, which are GGUF files, too
_MAX_LISTED = 40


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository."""

    path: str
    bytes: int
    sha256: str | None = None

    @property
    def name(self) -> str:
        """File name without folders."""
        return PurePosixPath(self.path).name


@dataclass(frozen=True, slots=True)
class FileSet:
    """The files that make up one model, in order."""

    label: str  # the quantization as written by the publisher
    files: tuple[RemoteFile, ...]
    count: int  # number of splits according to the file names

    @property
    def bytes(self) -> int:
        """Total size."""
        return sum(file.bytes for file in self.files)

    @property
    def stem(self) -> str:
        """Folder and name without the split number."""
        first = PurePosixPath(self.files[0].path)
        return str(first.with_name(split_of(first.name)[0]))


def file_sets(files: Iterable[RemoteFile]) -> tuple[FileSet, ...]:
    """Group a repository's GGUFs into models, by path."""
    groups: dict[tuple[str, int], dict[int, RemoteFile]] = {}
    for file in files:
        if file.path.lower().endswith(".gguf") and not file.name.lower().startswith(_NOT_MODELS):
            stem, index, count = split_of(file.name)
            groups.setdefault((str(PurePosixPath(file.path).with_name(stem)), count), {})[index] = file
    return tuple(
        FileSet(_label(PurePosixPath(stem)), tuple(file for _, file in sorted(found.items())), count)
        for (stem, count), found in sorted(groups.items())
    )


def choose(repo: str, sets: Sequence[FileSet], wanted: str | None) -> FileSet:
    """The set for `wanted`, a quantization in any case or the path of one of its files.

    Raises `UnknownModel`, `UsageError` if several sets match, or `MissingSplit`.
    """
    if not sets:
        raise UnknownModel(f"{repo} contains no GGUF files", hint="find a repository whose name ends in -GGUF")
    found = _matching(sets, wanted)
    if not found:
        labels = _listed(item.label for item in sets)
        raise UnknownModel(f"{repo} has no {wanted}", hint=f"{_nearest(wanted, sets)}it has {labels}")
    if len(found) > 1 and wanted is None:
        labels = _listed(item.label for item in sets)
        raise UsageError(f"{repo} has {len(sets)} models", hint=f"use hf:{repo}:QUANT with one of {labels}")
    if len(found) > 1:
        options = "".join(f"\n  hf:{repo}:{item.files[0].path}  ({format_bytes(item.bytes)})" for item in found)
        raise UsageError(f"{wanted} matches {len(found)} models in {repo}", hint=f"give a file:{options}")
    chosen = found[0]
    missing = chosen.count - len(chosen.files)
    if missing:
        raise MissingSplit(
            f"{repo} lacks {missing} of the {chosen.count} files of {chosen.stem}",
            hint="the upload may be incomplete; choose another quantization or try later",
        )
    return chosen


def _matching(sets: Sequence[FileSet], wanted: str | None) -> list[FileSet]:
    if wanted is None:
        return list(sets)
    key = wanted.casefold()
    if key.endswith(".gguf"):
        return [item for item in sets if any(file.path.casefold() == key for file in item.files)]
    exact = [item for item in sets if item.label.casefold() == key]
    if exact:
        return exact
    # Q4_K_XL matches UD-Q4_K_XL, but Q4_K does not match Q4_K_S
    whole_word = re.compile(rf"(?:^|[-./]){re.escape(key)}(?:$|[-./])")
    return [item for item in sets if whole_word.search(item.stem.casefold())]


def _nearest(wanted: str | None, sets: Sequence[FileSet]) -> str:
    known = {item.label.casefold(): item.label for item in sets}
    near = difflib.get_close_matches((wanted or "").casefold(), known, n=1, cutoff=0.3)
    return f"did you mean {known[near[0]]}? " if near else ""


def _label(stem: PurePosixPath) -> str:
    match = _QUANT.search(stem.name)
    if match:
        return match[1]
    return stem.parent.name or stem.name


def _listed(labels: Iterable[str]) -> str:
    names = sorted(set(labels))
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
