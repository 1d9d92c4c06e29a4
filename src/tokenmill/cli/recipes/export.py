"""`tokenmill export`: converts a table of `tokenmill distill` to a training format."""

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
    output: Annotated[Path, Parameter(name=("--output", "-o"), metavar="FILE")],
    cut_too: bool = False,
    with_reasoning: bool = False,
    check: bool = False,
    force: bool = False,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Convert a table of `tokenmill distill` to a training format.

    messages, sharegpt and alpaca are JSONL; parquet has the messages as lists of structs, plus the teacher's tokens and
    log probabilities. Every sample is one row. Truncated and empty answers are omitted and counted. The file is written
    atomically, and replaces only an export in the same format.

        tokenmill export teacher.parquet --to messages -o train.jsonl

    Parameters
    ----------
    table:
        Table written by `tokenmill distill`: Parquet or JSONL.
    to:
        Format of the export; messages is OpenAI's format, as used by TRL.
    output:
        Write the export to FILE: .parquet for parquet, else .jsonl, .jsonl.gz or .jsonl.zst.
    cut_too:
        Include answers truncated at the token limit.
    with_reasoning:
        Put the reasoning before the answer, in `<think>` tags.
    check:
        Load the file with the `datasets` library afterwards and compare every row with the table.
    force:
        Overwrite any existing OUTPUT.
    """
    if not table.is_file():
        raise UsageError(f"table {table} does not exist", hint="use a table written by tokenmill distill")
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
    """The report of an export as labels and values."""
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
    """Parse FORMAT=FILE; UsageError if the format is unknown or the file cannot be written."""
    name, equals, path = text.partition("=")
    for known in FORMATS:
        if name == known and equals and path:
            check_output(Path(path), known, force=force)
            return known, Path(path)
    raise UsageError(
        f"--export must be FORMAT=FILE (got {text})",
        hint=f"for example messages=train.jsonl; formats: {', '.join(FORMATS)}",
    )
