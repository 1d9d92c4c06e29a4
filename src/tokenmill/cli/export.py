"""`tokenmill export`: converts a table of `tokenmill distill` to a trainer's format."""

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
    """Convert a table of `tokenmill distill` to a training format.

    messages, sharegpt and alpaca are JSONL; parquet has the messages as lists of structs, plus the teacher's tokens and
    log probabilities. Every sample is one row. Truncated and empty answers are omitted and counted. The file is written
    atomically. It may replace an export in the same format, but no other file.

    Parameters
    ----------
    table:
        A table written by tokenmill distill: Parquet or JSONL.
    to:
        messages (OpenAI's format, as used by TRL), sharegpt, alpaca or parquet.
    output:
        The output file: .jsonl, .jsonl.gz or .jsonl.zst; .parquet for parquet.
    cut_too:
        Include answers truncated at the token limit; default: finished answers only.
    with_reasoning:
        Prepend the reasoning to the answer, in `<think>` tags; default: the answer alone.
    check:
        Load the file with the `datasets` library afterwards and compare every row with the table.
    force:
        Overwrite any existing OUTPUT.
    """
    if not table.is_file():
        raise UsageError(f"table {table} does not exist", hint="give a table written by tokenmill distill")
    if output.exists() and output.samefile(table):
        raise UsageError(f"{output} is the input table", hint="choose another output file")
    done = exported(table, output, ExportRequest(to, cut_too, with_reasoning), checked=check, force=force)
    if common.json:
        show_json(done)
    else:
        show(facts(rows_about(done)))


def exported(table: Path, output: Path, wanted: ExportRequest, *, checked: bool, force: bool) -> dict[str, Any]:
    """Write an export and, if requested, read it back; return a report of it."""
    check_output(output, wanted.format, force=force)
    made = exporting.export(table, output, wanted)
    read = check(table, output, wanted) if checked else None
    return document(made, read)


def check_output(output: Path, format: ExportFormat, *, force: bool) -> None:
    """UsageError if an export cannot be written, or would replace a file that is not an export."""
    check_export(output, format)
    check_target(output)
    if not force:
        check_replaceable(output, format)


def document(made: Exported, read: Checked | None) -> dict[str, Any]:
    """An export as JSON."""
    return asdict(made) | {"checked": None if read is None else asdict(read)}


def rows_about(done: dict[str, Any]) -> dict[str, str]:
    """An export for a terminal."""
    rows = {done["format"]: f"{number_of(done['rows'], 'row')} in {done['path']}"}
    left = [f"{done[key]:,} {what}" for key, what in (("cut", "truncated"), ("empty", "empty")) if done[key]]
    if left:
        rows["left out"] = ", ".join(left) + ("; --cut-too includes truncated answers" if done["cut"] else "")
    if done["checked"] is not None:
        read = done["checked"]
        rows["read back"] = f"{number_of(read['rows'], 'row')}, all values equal, with datasets {read['version']}"
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
