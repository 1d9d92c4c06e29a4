"""`tokenmill report`: writes a page on a machine and a model."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tokenmill.api.stores import store_address
from tokenmill.cli.options import EngineFlags, ModelArgument
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
    model: ModelArgument = None,
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"), metavar="FILE")] = None,
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    store: Annotated[str | None, Parameter(metavar="STORE")] = None,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Write a page on a machine and a model: the plan, the measurements and the commands to run.

    Loads and measures nothing. Every figure is marked as predicted, or as measured with its machine, build and date;
    unknown figures name the command that measures them. The page needs no network.

        tokenmill report kimi.gguf -o report.html

    Parameters
    ----------
    model:
        GGUF file, safetensors folder, catalogue name or name of a downloaded model. [default: the downloaded model that
        was measured last, or smollm2 if downloaded, or only the machine]
    output:
        Write to FILE: .html for a web page, .md for Markdown. [default: Markdown on stdout]
    store:
        Batch store: a folder, or postgresql://USER@HOST/DATABASE. [default: from the configuration, or batches in the
        state folder]
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
    """UsageError unless `output` is a new file or an existing report."""
    if output.suffix.lower() not in (*_HTML, *_MARKDOWN):
        raise UsageError(f"--output must end in .html or .md (got {output})", hint="for example report.html")
    if not output.is_file() or not output.stat().st_size:
        return
    with output.open("rb") as file:
        start = file.read(4096)
    if GENERATOR.encode() not in start and MARK.encode() not in start:
        raise UsageError(f"{output} exists and is not a report", hint="choose another output file, or remove it first")


def _written(found: ReportPage, output: Path) -> str:
    return page(found) if output.suffix.lower() in _HTML else markdown(found)
