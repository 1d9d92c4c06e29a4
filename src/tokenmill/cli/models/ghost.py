"""`tokenmill models ghost`: writes a header-only GGUF file."""

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
    output: Annotated[Path, Parameter(alias="-o", metavar="FILE")],
    source: Annotated[str | None, Parameter(name="--from", metavar="FILE")] = None,
    force: bool = False,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Write a header-only GGUF file: real metadata, no weights.

    It takes a few megabytes of disk for a model of any size. `tokenmill plan`, `tokenmill inspect` and llama.cpp's dry
    runs treat it as the model. It cannot be loaded.

        tokenmill models ghost kimi-k2.5:Q4_K_S -o kimi.gguf

    Parameters
    ----------
    model
        Catalogue name with a quantization, such as kimi-k2.5:Q4_K_S; the vocabulary is a placeholder.
    output
        Write to FILE.
    source
        Copy the header of this GGUF file instead, including its vocabulary; any split or an http(s) URL.
    force
        Overwrite an existing file.
    """
    if (model is None) == (source is None):
        raise UsageError("give either a catalogue name or --from FILE", hint="tokenmill models list lists the names")
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
