"""`tokenmill models list`: lists downloaded models and known names."""

from typing import Annotated

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from tokenmill.api.planning.ranking import RankedModel, Ranking, rank
from tokenmill.cli.options import TokenCount
from tokenmill.cli.output import Common, show, show_json
from tokenmill.errors import UsageError
from tokenmill.model import catalog
from tokenmill.model.pull import Pulled, names, pulled
from tokenmill.units import format_bytes, format_count, number_of


def list_models(
    *,
    fits: Annotated[str | None, Parameter(metavar="MACHINE")] = None,
    context: Annotated[TokenCount | None, Parameter(alias="-c")] = None,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """List downloaded models, and the names that can be downloaded, inspected or planned for.

    With --fits, list the models of the catalogue that a machine can run, most parameters first, each in the
    largest of its usual quantizations that fits, with predicted speeds of one sequence.

        tokenmill models list --fits this
        tokenmill models list --fits epyc-9175f --context 32k --json

    Parameters
    ----------
    fits
        Machine to fit: this, a name from `tokenmill machines`, or a machine file.
    context
        Context length with --fits, in tokens. [default: 8192]
    """
    if fits is not None:
        _show_ranking(rank(fits, common.load_config(), context=context), common)
        return
    if context is not None:
        raise UsageError("--context needs --fits", hint="for example: tokenmill models list --fits this --context 32k")
    models_path = common.load_config().models_path
    models = pulled(models_path)
    shapes = catalog.names()
    if common.json:
        show_json(
            {
                "models_dir": models_path,
                "pulled": [
                    {
                        "name": model.name,
                        "path": model.path,
                        "files": model.files,
                        "bytes": model.bytes,
                        "complete": model.complete,
                        "missing_files": model.missing,
                        "partial_bytes": model.partial_bytes,
                    }
                    for model in models
                ],
                "pullable": names(),
                "catalog": shapes,
            }
        )
        return
    show(_table(models) if models else "no downloaded models; to download one: tokenmill models pull smollm2")
    show(f"in {models_path}" if models else "", f"to download: {', '.join(names())}, or hf:OWNER/REPO:QUANT")
    show(f"catalogue, for plan and inspect: {', '.join(shapes)}")


def _show_ranking(ranking: Ranking, common: Common) -> None:
    if common.json:
        show_json(ranking)
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    for column in ("parameters", "active", "size", "decode", "prefill"):
        table.add_column(column, justify="right", no_wrap=True)
    for model in ranking.fits:
        table.add_row(f"{model.name}:{model.quantization}", *_cells(model))
    if ranking.fits:
        show(table, Text(f"decode and prefill in tok/s, predicted; context {ranking.context:,}, one sequence"))
    else:
        show(f"no model of the catalogue fits {ranking.machine} in its usual quantizations")
    if any(model.decode_tok_s is None for model in ranking.fits):
        show("?: the bandwidth of the machine is unknown; tokenmill probe --measure measures this one")
    if ranking.too_large:
        larger = number_of(len(ranking.too_large), "model")
        show(f"{larger} too large; tokenmill plan MODEL --machine NAME shows what is missing")


def _cells(model: RankedModel) -> tuple[str, ...]:
    speeds = (
        "?" if speed is None else f"{speed:.3g}" if speed < 1000 else f"{speed:.0f}"
        for speed in (model.decode_tok_s, model.prefill_tok_s)
    )
    return (format_count(model.parameters), format_count(model.active_parameters), format_bytes(model.bytes), *speeds)


def _table(models: tuple[Pulled, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("files", justify="right")
    table.add_column("state", overflow="fold")
    for model in models:
        table.add_row(model.name, format_bytes(model.bytes + model.partial_bytes), str(len(model.files)), _state(model))
    return table


def _state(model: Pulled) -> str:
    return "complete" if model.complete else f"{model.missing} of {model.missing + len(model.files)} files missing"
