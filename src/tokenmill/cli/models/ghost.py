"""`tokenmill models ghost`: a file that is a giant model to everything that reads headers."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tokenmill.cli.output import Common, facts, show, show_json
from tokenmill.errors import UsageError
from tokenmill.model.synthetic import ghost as ghosts
from tokenmill.units import format_bytes, format_count


def ghost(
    model: str | None = None,
    /,
    *,
    output: Annotated[Path, Parameter(alias="-o")],
    source: Annotated[str | None, Parameter(name="--from")] = None,
    force: bool = False,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Write a GGUF with a model's true header and a hole in place of its weights.

    It takes a few megabytes of disk whatever the model's size; planners and
    llama.cpp's dry runs take it for the model. It cannot be loaded.

    Parameters
    ----------
    model
        A catalogue name with a quant, such as kimi-k2.5:Q4_K_S; its vocabulary is a placeholder.
    output
        The file to write.
    source
        Copy the header of this GGUF instead, vocabulary and all; any split of it or an http(s) address will do.
    force
        Overwrite an existing file.
    """
    if (model is None) == (source is None):
        raise UsageError("give either a catalogue name or --from FILE", hint="tokenmill models list shows the names")
    written = ghosts.write(model or source or "", output, force=force)
    if common.json:
        show_json(written)
        return
    show(
        facts(
            {
                "ghost": written.path,
                "of": f"{written.source} ({written.architecture or 'architecture not stated'})",
                "tensors": f"{written.tensors}, {format_count(written.parameters)} parameters",
                "size": f"{format_bytes(written.apparent_bytes)}, of which {format_bytes(written.disk_bytes)} on disk",
            }
        )
    )
