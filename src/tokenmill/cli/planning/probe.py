"""`tokenmill probe`: describes this machine and measures its bandwidths (--measure)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tokenmill.api import inspecting as api
from tokenmill.cli.output import Common, say, show, show_json
from tokenmill.errors import ConfigError, UsageError
from tokenmill.hardware import machine_file
from tokenmill.hardware.machine import Disk, Dram, Gpu, Limits, Machine, Measurements, PcieLink, Pmem
from tokenmill.units import format_bytes, format_gb_s, format_ranges

UNKNOWN = "unknown"


def probe(
    *,
    path: Path | None = None,
    measure: bool = False,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"), metavar="FILE")] = None,
    machine: Annotated[str | None, Parameter(metavar="NAME")] = None,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Describe this machine: processors, memory, PMem, GPUs, disk and limits.

    Guesses nothing: unknown values are shown as unknown, with the command that determines them.

        tokenmill probe --measure -o machine.toml

    Parameters
    ----------
    path:
        Folder whose disk is described. [default: the folder of downloaded models]
    measure:
        Also measure the bandwidth of memory, disk and GPUs, which takes some seconds under full load.
    output:
        Also write a machine file, to plan for this machine elsewhere or to correct values by hand.
    machine:
        Show this catalogue machine or machine file. [default: this machine]
    """
    if output:
        _check_output(output)
    found = api.probe(measure=measure, path=path, machine=machine, config=common.config)
    if output:
        machine_file.write(found, output)
        say(f"wrote {output}; plan for this machine with --machine {output}")
    elif measure:
        say("not stored; to plan with these rates, add -o machine.toml, then plan with --machine machine.toml")
    if common.json:
        show_json(found)
    else:
        show(*render(found))


def render(machine: Machine) -> list[RenderableType]:
    """The machine as tables, followed by notes on unknown values."""
    first = _sections()
    last = _sections()
    _rows(first, "machine", [machine.name, _where(machine)])
    _rows(first, "CPU", _cpu(machine))
    _rows(first, "memory", _memory(machine.dram, cache=machine.pmem is not None and _is_memory(machine.pmem)))
    if machine.pmem:
        _rows(first, "PMem", _pmem(machine.pmem))
    _rows(first, "NUMA", _numa(machine))
    _rows(last, "NVLink" if machine.gpus else "GPUs", _links(machine) or ([] if len(machine.gpus) == 1 else ["none"]))
    _rows(last, "disk", _disk(machine.disk, machine.measured))
    _rows(last, "swap", [_swap(machine)])
    _rows(last, "huge pages", [_huge_pages(machine)])
    _rows(last, "limits", _limits(machine.limits))
    gpus: list[RenderableType] = [Text(), _gpus(machine.gpus), Text()] if machine.gpus else []
    measured: list[RenderableType] = [Text(), _measured(machine, machine.measured)] if machine.measured else []
    return [first, *gpus, last, *measured, *_notes(machine)]


def _check_output(path: Path) -> None:
    """UsageError if `path` exists and is not a machine file."""
    if not path.is_file() or not path.stat().st_size:
        return
    try:
        machine_file.read(path)
    except ConfigError as error:
        raise UsageError(
            f"{path} exists and is not a machine file", hint="choose another output file, or remove it first"
        ) from error


def _sections() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=len("huge pages"))
    return table


def _rows(table: Table, label: str, lines: list[str]) -> None:
    for number, line in enumerate(lines):
        table.add_row(Text(label if number == 0 else "", style="bold"), Text(line))


def _where(machine: Machine) -> str:
    parts = [machine.os or "operating system unknown"]
    parts += [f"a virtual machine ({machine.virtual})"] if machine.virtual else []
    parts += [f"in a container ({machine.container})"] if machine.container else []
    return ", ".join(parts)


def _cpu(machine: Machine) -> list[str]:
    cpu = machine.cpu
    threads = f", {cpu.threads_per_core} threads each" if (cpu.threads_per_core or 1) > 1 else ""
    return [
        cpu.model or UNKNOWN,
        f"{_known(cpu.sockets)} socket{'' if cpu.sockets == 1 else 's'}, {_known(cpu.cores)} cores{threads}, "
        f"L3 {_size(cpu.l3_bytes)}",
        " ".join(cpu.isa) or "instruction sets unknown",
    ]


def _memory(dram: Dram, *, cache: bool) -> list[str]:
    use = "as the cache of PMem" if cache else f"{_size(dram.available_bytes)} available"
    lines = [f"{_size(dram.total_bytes)}, {use}"]
    if dram.dimms:
        sizes = sorted({dimm.size_bytes for dimm in dram.dimms})
        empty = f", {dram.slots - len(dram.dimms)} of {dram.slots} slots not holding DRAM" if dram.slots else ""
        lines.append(f"{len(dram.dimms)} modules of {' and '.join(map(format_bytes, sizes))}{empty}")
    if dram.kind or dram.mts or dram.channels or dram.nominal_gb_s:
        speed = f"{dram.kind or 'kind unknown'}, {_known(dram.mts)} MT/s, {_known(dram.channels)} channels"
        return [*lines, f"{speed}, {_rate(dram.nominal_gb_s)} nominal"]
    return [*lines, "modules, channels and speed unknown"]


def _is_memory(pmem: Pmem) -> bool:
    return pmem.mode in ("memory", "mixed")


def _pmem(pmem: Pmem) -> list[str]:
    mode = {"memory": "Memory Mode", "app-direct": "App Direct", "mixed": "Memory Mode and App Direct"}
    lines = [f"{_known(pmem.dimms)} modules, {_size(pmem.total_bytes)}, {mode.get(pmem.mode or '', 'mode unknown')}"]
    if _is_memory(pmem):
        lines.append(f"{_size(pmem.memory_mode_bytes)} is the system's memory, {_size(pmem.available_bytes)} available")
    for space in pmem.namespaces:
        where = f"mounted at {space.mount}" if space.mount else "not mounted"
        lines.append(
            f"{space.name}: {space.mode}, {format_bytes(space.size_bytes)}, {space.device or UNKNOWN}, {where}"
        )
    return lines


def _numa(machine: Machine) -> list[str]:
    lines = [
        f"node {node.index}: {_size(node.memory_bytes)}, {_size(node.free_bytes)} free, "
        f"{f'CPUs {format_ranges(node.cpus)}' if node.cpus else 'no CPUs'}"
        for node in machine.numa
    ]
    if len(lines) > 1:
        rows = [" ".join(map(str, node.distances)) or UNKNOWN for node in machine.numa]
        lines.append(f"distances {', '.join(rows)}")
    return lines or [UNKNOWN]


def _gpus(gpus: tuple[Gpu, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("GPU", "name", "VRAM", "free", "nominal", "PCIe now", "at best", "limit"):
        table.add_column(heading, no_wrap=heading != "name", justify="left" if heading == "name" else "right")
    for gpu in gpus:
        now, best = _link(gpu.pcie)
        power = UNKNOWN if gpu.power_limit_w is None else f"{gpu.power_limit_w:.0f} W"
        name = gpu.name.removeprefix("NVIDIA ").removeprefix("AMD ")
        cells = (
            str(gpu.index),
            name,
            _size(gpu.vram_bytes),
            _size(gpu.free_bytes),
            _rate(gpu.nominal_gb_s),
            now,
            best,
            power,
        )
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _link(pcie: PcieLink) -> tuple[str, str]:
    ends = (pcie.generation, pcie.width), (pcie.max_generation, pcie.max_width)
    now, best = (UNKNOWN if end == (None, None) else f"{end[0] or '?'}.0 x{end[1] or '?'}" for end in ends)
    return now, best


def _links(machine: Machine) -> list[str]:
    return [
        f"GPUs {link.gpus[0]} and {link.gpus[1]}: {_known(link.links)} links, {_rate(link.nominal_gb_s)} each way"
        for link in machine.nvlinks
    ]


def _disk(disk: Disk | None, measured: Measurements | None) -> list[str]:
    if disk is None:
        return [UNKNOWN]
    read = measured.gb_s("disk") if measured else None
    return [
        disk.path,
        f"{disk.kind or 'kind unknown'}, {disk.device or 'device unknown'}, {disk.filesystem or 'filesystem unknown'}, "
        f"{_size(disk.free_bytes)} free of {_size(disk.total_bytes)}",
        *([f"reads {format_gb_s(read)}"] if read else []),
    ]


def _swap(machine: Machine) -> str:
    swap = machine.swap
    if swap is None:
        return UNKNOWN
    return f"{format_bytes(swap.total_bytes)}, {_size(swap.used_bytes)} used" if swap.total_bytes else "none"


def _huge_pages(machine: Machine) -> str:
    pages = machine.huge_pages
    if pages is None:
        return UNKNOWN
    reserved = (
        f"{pages.free} of {pages.total} pages of {_size(pages.page_bytes)} free" if pages.total else "none reserved"
    )
    return f"transparent: {pages.transparent or UNKNOWN}; {reserved}"


def _limits(limits: Limits) -> list[str]:
    if limits == Limits():  # a catalogue machine has none
        return ["none known"]
    cpus = "CPUs: all" if limits.cpuset is None else f"CPUs {format_ranges(limits.cpuset)}"
    quota = "" if limits.cgroup_cpus is None else f", time of {limits.cgroup_cpus:g} CPUs"
    memory = "all" if limits.cgroup_memory_bytes is None else format_bytes(limits.cgroup_memory_bytes)
    locked = "unlimited" if limits.memlock_bytes is None else format_bytes(limits.memlock_bytes)
    return [f"memory: {memory}; {cpus}{quota}; locked memory: {locked}"]


def _measured(machine: Machine, measured: Measurements) -> Table:
    """Nominal and measured bandwidths, by number of threads."""
    table = Table(
        box=None, padding=(0, 2, 0, 0), pad_edge=False, title=f"measured {measured.when}", title_justify="left"
    )
    for heading in ("path", "nominal", "measured", "share", "by threads"):
        table.add_column(heading, justify="left" if heading in ("path", "by threads") else "right")
    nominal = dict(_nominal(machine))
    for rate in measured.rates:
        best = nominal.get(rate.path)
        share = f"{100 * rate.gb_s / best:.0f} %" if best else ""
        threads = ", ".join(f"{count}: {gb_s:.1f}" for count, gb_s in rate.by_threads.items())
        threads = threads or (f"{rate.threads} threads" if rate.threads else "")
        table.add_row(rate.path, _rate(best) if best else "", format_gb_s(rate.gb_s), share, Text(threads))
    return table


def _nominal(machine: Machine) -> Iterator[tuple[str, float | None]]:
    for tier in machine.tiers():
        yield tier.name, tier.nominal_gb_s
    yield "dram", machine.dram.nominal_gb_s
    for gpu in machine.gpus:
        for path in (f"dram->gpu{gpu.index}", f"gpu{gpu.index}->dram"):
            yield path, gpu.pcie.nominal_gb_s


def _notes(machine: Machine) -> list[RenderableType]:
    # After a measurement, the advice to measure is omitted.
    notes = [note for note in machine.notes if not (machine.measured and "probe --measure" in note.text)]
    if not notes:
        return []
    lines = [Padding(Text.assemble((note.about, "bold"), f": {note.text}"), (0, 0, 0, 2)) for note in notes]
    return [Text(), Text("notes:"), *lines]


def _size(count: int | None) -> str:
    return UNKNOWN if count is None else format_bytes(count)


def _rate(gb_s: float | None) -> str:
    return UNKNOWN if gb_s is None else format_gb_s(gb_s)


def _known(value: object) -> str:
    return UNKNOWN if value is None else str(value)
