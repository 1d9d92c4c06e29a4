"""`tokenmill digest`: builds a byte-stable prompt prefix from files."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tokenmill.api.tokens import token_counter
from tokenmill.cli.options import Model, TokenCount
from tokenmill.cli.output import Common, facts, say, show, show_json
from tokenmill.errors import UsageError
from tokenmill.jobs.digest import Digest, build, estimate
from tokenmill.jobs.digest_files import Found, gather
from tokenmill.jobs.lint.report import LONG_DIGEST_TOKENS
from tokenmill.storage.atomic import new_file

SHOWN_NAMES = 5


def digest(
    *files: Path,
    output: Annotated[Path, Parameter(name=("--output", "-o"), metavar="FILE")],
    tokens: TokenCount = 8192,
    model: Model = None,
    force: bool = False,
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Build a digest: a byte-stable context file of limited size, to put at the start of many prompts.

    Equal content gives equal bytes, wherever the files are and whenever they were modified: names are relative, files
    are sorted, line ends are normalized, and there are no dates. Small files are included whole; large ones share the
    remaining tokens and are truncated, with an outline of the rest.

        tokenmill digest docs/ -o digest.md --tokens 8192

    Parameters
    ----------
    files:
        Files and folders; in folders, hidden, .gitignored and binary files are skipped.
    output:
        Write the digest to FILE.
    tokens:
        Maximum size in tokens.
    model:
        GGUF file or name of a downloaded model whose tokenizer counts tokens. [default: estimated, 4 bytes per token]
    force:
        Overwrite an existing file with different content.
    """
    if tokens < 1:
        raise UsageError(f"--tokens must be at least 1 (got {tokens})", hint="8,000 to 16,000 are usual")
    found = gather(files, leave_out=output)
    with token_counter(model, common.load_config()) as counting:
        made = build(found.documents, tokens, counting.count or estimate)
    if not made.text:
        raise UsageError("no text files found", hint="hidden, ignored and binary files are skipped")
    unchanged = _write(made, output, force=force)
    if common.json:
        show_json(_document(made, found, output, exact=counting.count is not None, unchanged=unchanged))
    else:
        _show(made, found, output, tokens, why_estimated=counting.why_not, unchanged=unchanged)
    if made.tokens > LONG_DIGEST_TOKENS:
        say(f"warning: a prefix of more than {LONG_DIGEST_TOKENS:,} tokens is slow to compute and slows down decoding")
    return 0


def _write(made: Digest, output: Path, *, force: bool) -> bool:
    """Write the file unless it has this content already; return whether it had."""
    data = made.text.encode()
    if output.is_file() and output.read_bytes() == data:
        return True
    with new_file(output, force=force) as file:
        file.write(data)
    return False


def _show(made: Digest, found: Found, output: Path, budget: int, *, why_estimated: str | None, unchanged: bool) -> None:
    names: dict[str, list[str]] = {"whole": [], "part": [], "none": []}
    for entry in made.entries:
        names[entry.shown].append(entry.name)
    how = f", estimated at 4 bytes each; {why_estimated}" if why_estimated else ""
    rows = {
        "digest": f"{output}{' (unchanged)' if unchanged else ''}",
        "tokens": f"{made.tokens:,} of {budget:,}{how}",
        "whole": _names(names["whole"]),
        "cut": _names(names["part"]),
        "not shown": _names(names["none"]),
        "skipped": _names([f"{name} ({why})" for name, why in found.skipped]),
        "sha256": made.sha256,
    }
    show(facts({label: value for label, value in rows.items() if value}))


def _names(names: list[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(names[:SHOWN_NAMES])
    more = f", and {len(names) - SHOWN_NAMES:,} more" if len(names) > SHOWN_NAMES else ""
    return f"{len(names):,}: {shown}{more}"


def _document(made: Digest, found: Found, output: Path, *, exact: bool, unchanged: bool) -> dict[str, Any]:
    return {
        "output": str(output),
        "tokens": made.tokens,
        "tokens_counted": exact,
        "bytes": len(made.text.encode()),
        "sha256": made.sha256,
        "unchanged": unchanged,
        "files": [{"path": entry.name, "tokens": entry.tokens, "shown": entry.shown} for entry in made.entries],
        "left_out": [{"path": name, "reason": reason} for name, reason in found.skipped],
    }
