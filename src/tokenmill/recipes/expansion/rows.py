"""Rows of an expanded dataset: the example in the seeds' format, and its provenance.

Rows do not depend on time or on the number of runs: an interrupted and resumed run writes the same bytes.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.errors import UsageError
from tokenmill.recipes.expansion.answers import Dropped
from tokenmill.recipes.expansion.lines import ExpandPrompts, ExpansionJob
from tokenmill.recipes.expansion.seeds import Example, Parent, Seeds
from tokenmill.recipes.runner import AnswerOrigin
from tokenmill.storage.lines import is_parquet
from tokenmill.storage.rows import check_target, read_rows, suffix_of, write_rows

SEED = "seed"
PROVENANCE: Mapping[str, str] = {
    "id": "string",
    "parent": "string",
    "root": "string",
    "way": "string",
    "detail": "string",
    "depth": "int32",
    "round": "int32",
    "prompt_file": "string",
    "prompt_sha256": "string",
    "model": "string",
    "model_id": "string",
    "engine": "string",
    "build": "string",
    "temperature": "float64",
    "top_p": "float64",
    "seed": "int64",
    "max_tokens": "int32",
    "score": "int32",
}
_TAKEN = "expand_"  # prefix for names that the seeds use
_SIGN = "tokenmill.recipe"
_KINDS: Mapping[bytes, str] = {
    b"{": "JSON",
    b"[": "JSON",
    b"\x1f\x8b": "gzip data",
    b"\x28\xb5\x2f\xfd": "zstd data",
}
_BEGINNING = 512  # bytes examined at the start of a file


@dataclass(frozen=True, slots=True)
class NewExample:
    """A new example with its provenance."""

    id: str
    job: ExpansionJob
    round: int
    example: Example
    origin: AnswerOrigin  # the model and engine that wrote it
    score: int | None = None

    def dropped(self, why: Dropped) -> "Rejected":
        """The rejected form of this example."""
        return Rejected(self.id, self.job, self.round, why, self.example, self.origin)

    @property
    def parent(self) -> Parent:
        """This example as a parent for others."""
        old = self.job.parent
        return Parent(self.id, old.root, old.depth + 1, self.example, old.carried)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A rejected line, for the file of rejects."""

    id: str
    job: ExpansionJob
    round: int
    dropped: Dropped
    example: Example | None
    origin: AnswerOrigin


def provenance_names(seeds: Seeds) -> dict[str, str]:
    """Names of provenance columns, prefixed if the seeds use them."""
    taken = {*seeds.shape.types, *seeds.carried}
    return {name: _TAKEN + name if name in taken else name for name in PROVENANCE}


def columns_of(seeds: Seeds) -> dict[str, str]:
    """All columns with their types, in order."""
    names = provenance_names(seeds)
    return {**seeds.shape.types, **seeds.carried, **{names[name]: kind for name, kind in PROVENANCE.items()}}


def write_expanded(
    path: Path, seeds: Seeds, made: Iterable[NewExample], prompts: ExpandPrompts, *, keep_seeds: bool
) -> int:
    """Write the dataset; return the number of rows."""
    names = provenance_names(seeds)

    def rows() -> Iterator[dict[str, Any]]:
        for parent in seeds.parents if keep_seeds else ():
            of = {"id": parent.id, "root": parent.id, "way": SEED, "depth": 0}
            yield {**seeds.shape.row(parent.example), **parent.carried, **{names[key]: of[key] for key in of}}
        for one in made:
            of = _provenance(one, prompts) | {"score": one.score}
            content = seeds.shape.row(one.example)
            yield {**content, **one.job.parent.carried, **{names[key]: of[key] for key in of}}

    return write_rows(path, rows(), columns_of(seeds), metadata={_SIGN: "expand", "tokenmill.seeds": seeds.path.name})


def write_rejected(path: Path, seeds: Seeds, rejected: Iterable[Rejected], prompts: ExpandPrompts) -> int:
    """Write rejected lines with the reason; return the number of rows."""
    names = provenance_names(seeds)
    why, reason = (_TAKEN + name if name in seeds.shape.types else name for name in ("why", "reason"))
    columns = {why: "string", reason: "string", **columns_of(seeds)}

    def rows() -> Iterator[dict[str, Any]]:
        for one in rejected:
            of = _provenance(one, prompts)
            content = {} if one.example is None else seeds.shape.row(one.example)
            given = {why: one.dropped.why, reason: one.dropped.reason}
            yield {**given, **content, **one.job.parent.carried, **{names[key]: of[key] for key in of}}

    return write_rows(path, rows(), columns, metadata={_SIGN: "expand"})


def _provenance(one: NewExample | Rejected, prompts: ExpandPrompts) -> dict[str, Any]:
    job = one.job
    origin = one.origin
    sampling = prompts.sampling
    prompt = prompts.prompts[job.variant.way]
    return {
        "id": one.id,
        "parent": job.parent.id,
        "root": job.parent.root,
        "way": job.variant.way,
        "detail": job.variant.detail,
        "depth": job.parent.depth + 1,
        "round": one.round,
        "prompt_file": prompt.name,
        "prompt_sha256": prompt.sha256,
        "model": origin.model,
        "model_id": origin.model_id,
        "engine": origin.engine,
        "build": origin.build,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": prompts.seed(job),
        "max_tokens": sampling.max_tokens,
    }


def check_targets(output: Path, seeds: Path, rejected: Path | None) -> None:
    """Raise UsageError if an output cannot be written or would overwrite the seeds."""
    targets = [output] if rejected is None else [output, rejected]
    for target in targets:
        if target.exists() and seeds.exists() and target.samefile(seeds):
            raise UsageError(f"{target} is the file of seeds", hint="use another output file")
        check_target(target)
        if target.exists():
            _check_content(target)
        if target.exists() and not _is_ours(target):
            raise UsageError(
                f"{target} exists and was not written by tokenmill expand", hint="use another file, or remove it"
            )
    if rejected is not None and rejected.absolute() == output.absolute():
        raise UsageError("--output and --rejected are the same file", hint="use two files")


def existing_rows(path: Path) -> int:
    """Number of rows of an earlier table of this recipe; 0 without one."""
    try:
        return sum(1 for _ in read_rows(path)) if path.exists() and _is_ours(path) else 0
    except UsageError:
        return 0


def _check_content(path: Path) -> None:
    """Raise UsageError for a .parquet file with other content."""
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING)
    if suffix_of(path) != ".parquet" or not beginning or is_parquet(path):
        return
    found = next((name for start, name in _KINDS.items() if beginning.lstrip().startswith(start)), None)
    if found is None:
        found = "binary data" if b"\0" in beginning else "text"
    raise UsageError(f"{path} exists and contains {found}, not Parquet", hint="use another file, or remove it")


def _is_ours(path: Path) -> bool:
    """Whether a file may be replaced: this recipe wrote it, or it is empty."""
    if path.stat().st_size == 0:
        return True
    first = next(read_rows(path), None)
    if first is None:
        return True
    return all(first.keys() & {name, _TAKEN + name} for name in PROVENANCE)
