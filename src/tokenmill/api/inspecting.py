"""`probe` describes this machine and `inspect` a model. Neither loads a model."""

from dataclasses import replace
from pathlib import Path

from tokenmill.api.planning.plan import configuration, locate
from tokenmill.api.progress import log
from tokenmill.config import Config
from tokenmill.errors import UsageError
from tokenmill.hardware import catalog
from tokenmill.hardware.machine import Machine
from tokenmill.hardware.probe import probe as read_machine
from tokenmill.model.profile import Profile
from tokenmill.model.read import read


def probe(
    *,
    measure: bool = False,
    path: str | Path | None = None,
    machine: str | Path | None = None,
    config: Config | str | Path | None = None,
) -> Machine:
    """Describe this machine: processors, memory, GPUs, disk and limits. Unknown facts are None.

    `measure`: also measure the bandwidth of memory, disk and GPUs, which takes some seconds and loads the machine.
    `path`: the folder whose disk is described; default: where pulled models are kept. `machine`: a catalogue machine or
    a machine file to read instead; UsageError together with `measure` or `path`.
    """
    if machine is not None and machine != catalog.THIS:
        if measure or path is not None:
            option = "measure" if measure else "path"
            raise UsageError(
                f"{option} and machine are mutually exclusive: machine {machine} is a description",
                hint="leave out machine",
            )
        return catalog.find(str(machine))
    folder = configuration(config).models_path if path is None else Path(path)
    found = read_machine(folder)
    if not measure:
        return found
    from tokenmill.hardware.bandwidth.measure import measure as measure_bandwidth  # noqa: PLC0415  imports numpy

    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return replace(found, measured=measure_bandwidth(found, path=existing, progress=log.info))


def inspect(model: str | Path, *, config: Config | str | Path | None = None) -> Profile:
    """Read a model's header: its architecture, tensors, KV layout and tokenizer. No tensor is read.

    `model`: as for `tokenmill.plan`. UnknownModel if it is neither a file, a URL, a pulled model nor a catalogue name.
    """
    return read(locate(str(model), configuration(config), remote=True))
