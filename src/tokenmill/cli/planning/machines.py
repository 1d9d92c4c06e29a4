"""`tokenmill machines`: lists the machine catalogue, or shows one machine in full."""

from collections import Counter

from rich.table import Table
from rich.text import Text

from tokenmill.cli.output import Common, say, show, show_json
from tokenmill.hardware import catalog
from tokenmill.hardware.machine import Cpu, Gpu, Machine
from tokenmill.units import format_bytes, format_gb_s

UNKNOWN = "?"
# Removed from processor names, because the table has 80 columns.
_SHORTER = {
    "(R)": "",
    "AMD ": "",
    "Intel ": "",
    "Ryzen Threadripper": "TR",
    "Platinum ": "",
    "Gold ": "",
    "Core ": "",
}


def machines(
    name: str | None = None,
    /,
    *,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """List the machine catalogue, or show one machine in full.

    Other commands plan for a machine of the catalogue with `--machine NAME`.

        tokenmill machines
        tokenmill machines epyc-9175f

    Parameters
    ----------
    name:
        Catalogue name, machine file, or this. [default: list the catalogue]
    """
    if name is not None:
        _show_one(catalog.find(name), as_json=common.json)
        return
    every = catalog.load_all()
    if common.json:
        show_json(every)
        return
    show(_table(every))
    say("GB/s is nominal. tokenmill machines NAME shows a machine in full, with the source of each figure.")


def _show_one(machine: Machine, *, as_json: bool) -> None:
    if as_json:
        show_json(machine)
        return
    from tokenmill.cli.planning.probe import render  # noqa: PLC0415  only this branch needs it

    show(*render(machine))


def _table(every: tuple[Machine, ...]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("cpu")
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("GB/s", justify="right", no_wrap=True)
    table.add_column("gpus")
    for machine in every:
        size, rate = _memory(machine)
        table.add_row(machine.name, Text(_cpu(machine.cpu)), size, rate, Text(_gpus(machine.gpus)))
    return table


def _cpu(cpu: Cpu) -> str:
    model = cpu.model or UNKNOWN
    for words, short in _SHORTER.items():
        model = model.replace(words, short)
    return f"{cpu.sockets} x {model}" if (cpu.sockets or 1) > 1 else model


def _memory(machine: Machine) -> tuple[str, str]:
    """Size and nominal bandwidth of the main memory; in Memory Mode that is PMem, and the DRAM is its cache."""
    tier = next(tier for tier in machine.tiers() if tier.kind in ("dram", "pmem"))
    size = UNKNOWN if tier.capacity_bytes is None else format_bytes(tier.capacity_bytes).replace(".0 ", " ")
    rate = UNKNOWN if tier.nominal_gb_s is None else format_gb_s(tier.nominal_gb_s).removesuffix(" GB/s")
    return size, rate


def _gpus(gpus: tuple[Gpu, ...]) -> str:
    counted = Counter(gpu.name for gpu in gpus)
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counted.items()) or "-"
