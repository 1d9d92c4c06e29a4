"""`tokenmill export`: a teacher's table in the formats that trainers read."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tokenmill.cli.output import Common, facts, show, show_json
from tokenmill.errors import UsageError
from tokenmill.recipes import export as exporting
from tokenmill.recipes.export import FORMATS, Exported, ExportFormat, ExportRequest, check_export, check_replaceable
from tokenmill.recipes.export_check import Checked, check
from tokenmill.storage.rows import check_target
from tokenmill.units import number_of


def export(
    table: Path,
    /,
    *,
    to: ExportFormat,
    output: Annotated[Path, Parameter(name=("--output", "-o"))],
    cut_too: bool = False,
    with_reasoning: bool = False,
    check: bool = False,
    force: bool = False,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Write what `tokenmill distill` wrote in a format that trainers read.

    messages, sharegpt and alpaca are lines of JSON; parquet has the messages as lists of structs, with the teacher's
    tokens and probabilities beside them. Every sample is a row of its own. Answers that ended at the limit of tokens
    are left out, and so are empty ones; how many is said. The file appears whole or not at all. It replaces an export
    in the same format, and no other file.

    Parameters
    ----------
    table:
        The table that distill wrote: Parquet or JSONL.
    to:
        messages (OpenAI's, as TRL reads them), sharegpt, alpaca, or parquet.
    output:
        The file to write: .jsonl, .jsonl.gz or .jsonl.zst; for parquet .parquet.
    cut_too:
        Take answers as well that ended at the limit of tokens; default: finished ones only.
    with_reasoning:
        Put the reasoning in front of the answer, in `<think>` tags; default: the answer alone.
    check:
        Load the file with the `datasets` library afterwards, and hold every row against the table.
    force:
        Replace OUTPUT, whatever it holds.
    """
    if not table.is_file():
        raise UsageError(f"there is no table {table}", hint="name what tokenmill distill wrote")
    if output.exists() and output.samefile(table):
        raise UsageError(f"{output} is the table itself", hint="name another file to write")
    done = exported(table, output, ExportRequest(to, cut_too, with_reasoning), checked=check, force=force)
    if common.json:
        show_json(done)
    else:
        show(facts(rows_about(done)))


def exported(table: Path, output: Path, wanted: ExportRequest, *, checked: bool, force: bool) -> dict[str, Any]:
    """Write an export and, where that is asked for, read it back; a document of it."""
    check_output(output, wanted.format, force=force)
    made = exporting.export(table, output, wanted)
    read = check(table, output, wanted) if checked else None
    return document(made, read)


def check_output(output: Path, format: ExportFormat, *, force: bool) -> None:
    """UsageError where an export cannot be written, or would replace what is none."""
    check_export(output, format)
    check_target(output)
    if not force:
        check_replaceable(output, format)


def document(made: Exported, read: Checked | None) -> dict[str, Any]:
    """An export for a program."""
    return asdict(made) | {"checked": None if read is None else asdict(read)}


def rows_about(done: dict[str, Any]) -> dict[str, str]:
    """An export for a person."""
    rows = {done["format"]: f"{number_of(done['rows'], 'row')} in {done['path']}"}
    left = [f"{done[key]:,} {what}" for key, what in (("cut", "cut off"), ("empty", "empty")) if done[key]]
    if left:
        rows["left out"] = ", ".join(left) + ("; --cut-too takes those that were cut off" if done["cut"] else "")
    if done["checked"] is not None:
        read = done["checked"]
        rows["read back"] = f"{number_of(read['rows'], 'row')}, every value the same, with datasets {read['version']}"
        rows["columns"] = ", ".join(read["features"])
    return rows


def parse_target(text: str, *, force: bool) -> tuple[ExportFormat, Path]:
    """FORMAT=FILE."""
    name, equals, path = text.partition("=")
    for known in FORMATS:
        if name == known and equals and path:
            check_output(Path(path), known, force=force)
            return known, Path(path)
    raise UsageError(f"--export {text} is not FORMAT=FILE", hint=f"--export messages=train.jsonl; {', '.join(FORMATS)}")
