"""Models by the name they were pulled under."""

from pathlib import Path

from tokenmill.cli.output import Common
from tokenmill.errors import UnknownModel
from tokenmill.model import catalog
from tokenmill.model.gguf import is_url


def where(model: str, common: Common) -> str:
    """The path of a pulled model; whatever is a file, an address or a catalogue name stays as it is."""
    if is_url(model) or Path(model).exists() or _in_catalogue(model):
        return model
    from tokenmill.model.pull import locate, names  # noqa: PLC0415  an HTTP client, and only for these

    if path := locate(model, common.load_config().models_path):
        return str(path)
    if model in names() or model.startswith("hf:"):
        raise UnknownModel(f"{model} is not here", hint=f"tokenmill models pull {model}")
    return model


def _in_catalogue(model: str) -> bool:
    return catalog.looks_like_name(model) and model.partition(":")[0].lower() in catalog.names()
