"""Describes a model of a Hugging Face repository without downloading it.

A repository of GGUFs is described by their headers, a repository without GGUFs by its config.json.
"""

from tokenmill.errors import PullError, RemoteError, UnknownModel
from tokenmill.model import derived
from tokenmill.model.describe import describe
from tokenmill.model.gguf import read_headers
from tokenmill.model.profile import Profile
from tokenmill.model.pull import hub
from tokenmill.model.pull.hub import Repository, WantedFiles

_CONFIG = "config.json"


def preview(name: str, *, endpoint: str | None = None) -> Profile:
    """The profile of `hf:OWNER/REPO` or `hf:OWNER/REPO:QUANT`; requests headers and configs only.

    Raises `UnknownModel`, `UsageError` or `PullError`, with the nearest valid choice where there is one.
    """
    wanted = hub.parse(name)
    found = hub.repository(wanted, endpoint=endpoint)
    if found.sets:
        offer = hub.offer_of(found, wanted)
        return describe(read_headers(offer.urls[0], offer.headers))
    if _CONFIG not in found.files:
        raise UnknownModel(
            f"{wanted.repo} contains neither GGUF files nor a config.json",
            hint="find a repository whose name ends in -GGUF, or the model's own repository",
        )
    return _derived(found, wanted)


def _derived(found: Repository, wanted: WantedFiles) -> Profile:
    url = found.url(_CONFIG)
    try:
        raw = derived.download_config(url, found.headers)
    except RemoteError as error:
        raise PullError(f"cannot read the config of {wanted.repo}: {error.message}", hint=error.hint) from error
    config = derived.parse_config(raw, f"{_CONFIG} of {wanted.repo}")
    return derived.profile(config, wanted.quant, wanted.repo.rpartition("/")[2], f"{_CONFIG} of {wanted.repo}")
