"""`tokenmill models list`: lists downloaded models and known names."""

from rich.table import Table

from tokenmill.cli.output import Common, show, show_json
from tokenmill.model import catalog
from tokenmill.model.pull import Pulled, names, pulled
from tokenmill.units import format_bytes


def list_models(
    *,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """List downloaded models, and the names that can be downloaded, inspected or planned for."""
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
