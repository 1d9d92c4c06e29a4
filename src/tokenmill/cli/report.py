"""`tokenmill report`: all that is known of a machine and a model, as one page."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tokenmill.api.stores import store_address
from tokenmill.cli.options import EngineFlags
from tokenmill.cli.output import Common, say, show_json, show_text
from tokenmill.errors import UsageError
from tokenmill.report.collect import collect
from tokenmill.report.render import GENERATOR, MARK, markdown, page
from tokenmill.report.report import ReportPage
from tokenmill.report.subject import subject, usual_model
from tokenmill.storage.atomic import new_file

_HTML = (".html", ".htm")
_MARKDOWN = (".md", ".markdown")


def report(
    model: str | None = None,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    store: str | None = None,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Put all that is known of a machine and a model on one page: the plan, what was measured, what to run.

    Loads and measures nothing. Every figure says whether it was measured (where, with which build, when) or predicted;
    what is not known yet names the command that would tell. The page needs no network and no script.

    Parameters
    ----------
    model:
        A GGUF file, a folder of safetensors, a catalogue name or the name of a pulled model; default: the pulled model
        that was measured last, else smollm2 where it was pulled, else the machine alone.
    output:
        The file to write: .html for a page, .md for Markdown; default: Markdown on stdout.
    store:
        The folder of batches; default: batches in the state folder.
    """
    if output is not None:
        _check(output)
    config = common.load_config()
    found = collect(
        subject(model or usual_model(config), options, config),
        config.state_path,
        batches=store_address(store, config),
    )
    if output is not None:
        with new_file(output, force=True) as file:
            file.write(_written(found, output).encode("utf-8", errors="backslashreplace"))
        say(f"wrote {output}")
    if common.json:
        show_json(found)
    elif output is None:
        show_text(markdown(found))


def _check(output: Path) -> None:
    """A report may be written over; nothing else may."""
    if output.suffix.lower() not in (*_HTML, *_MARKDOWN):
        raise UsageError(f"{output} is neither a page nor Markdown", hint="name it report.html or report.md")
    if not output.is_file() or not output.stat().st_size:
        return
    with output.open("rb") as file:
        start = file.read(4096)
    if GENERATOR.encode() not in start and MARK.encode() not in start:
        raise UsageError(f"{output} exists and is no report", hint="name another file, or remove this one first")


def _written(found: ReportPage, output: Path) -> str:
    return page(found) if output.suffix.lower() in _HTML else markdown(found)
