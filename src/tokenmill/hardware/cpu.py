"""Reads the CPUs: from lscpu's JSON if installed, else from /proc/cpuinfo and sysfs.

Clock rates are ignored; the number of cores and the instruction sets matter.
"""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenmill.hardware.host import Host, number
from tokenmill.hardware.machine import ISA_THAT_MATTERS, Cpu, Note
from tokenmill.units import parse_bytes

# Linux's name -> ours.
_ISA_ALIASES = {"asimd": "neon", "asimddp": "dotprod", "avx512vbmi": "avx512_vbmi"}
_CPUS = "/sys/devices/system/cpu"


def read_cpu(host: Host) -> tuple[Cpu, str | None, list[Note]]:
    """Return the processors, the hypervisor's name if there is one, and notes."""
    answer = host.run("lscpu", "-J")
    fields = parse_lscpu(answer.out) if answer and answer.code == 0 else {}
    blocks = parse_cpuinfo(host.text("/proc/cpuinfo") or "")
    flags = set(fields.get("Flags", "").split()) or _cpuinfo_flags(blocks)
    sockets, cores, threads_per_core = _counts(fields, blocks, host)
    cpu = Cpu(
        model=fields.get("Model name") or _cpuinfo_model(blocks),
        sockets=sockets,
        cores=cores,
        threads_per_core=threads_per_core,
        isa=isa(flags),
        # sysfs first: lscpu rounds 24.75 MiB to 24.8.
        l3_bytes=_sysfs_l3(host) or cache_total(fields.get("L3 cache") or fields.get("L3") or ""),
    )
    virtual = fields.get("Hypervisor vendor") or ("unnamed hypervisor" if "hypervisor" in flags else None)
    return cpu, virtual, _notes(cpu, host)


def parse_lscpu(text: str) -> dict[str, str]:
    """Field names without their colon to data; nested output (`children`) is flattened, `-` is dropped."""
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    found: dict[str, str] = {}
    waiting = _entries(document, "lscpu")
    while waiting:
        entry = waiting.pop(0)
        name = str(entry.get("field", "")).removesuffix(":")
        data = str(entry.get("data") or "")
        # A big.LITTLE machine repeats the fields once per kind of core; the first kind is the one reported.
        if name not in found and data not in ("", "-"):
            found[name] = data
        waiting = [*_entries(entry, "children"), *waiting]
    return found


def parse_cpuinfo(text: str) -> list[dict[str, str]]:
    """One mapping per logical CPU."""
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        pairs = (line.partition(":") for line in block.splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, _, value in pairs}
        if "processor" in fields:
            blocks.append(fields)
    return blocks


def isa(flags: Iterable[str]) -> tuple[str, ...]:
    """The flags that select a kernel."""
    have = {_ISA_ALIASES.get(flag, flag) for flag in flags}
    return tuple(flag for flag in ISA_THAT_MATTERS if flag in have)


def cache_total(text: str) -> int | None:
    """Read `512 MiB (16 instances)`; older versions print one instance's size alone, which is not a total."""
    match = re.fullmatch(r"([\d.]+ [KMG]iB) \(\d+ instances?\)", text.strip())
    return parse_bytes(match[1]) if match else None


def parse_numbers(text: str) -> tuple[int, ...]:
    """Read the kernel's `0-3,8,10-11`."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def format_numbers(cpus: Sequence[int]) -> str:
    """Format numbers like the kernel: `0-3,8,10-11`."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)


def _entries(value: Any, key: str) -> list[dict[str, Any]]:
    inner = value.get(key) if isinstance(value, dict) else None
    return [entry for entry in inner if isinstance(entry, dict)] if isinstance(inner, list) else []


def _counts(fields: dict[str, str], blocks: list[dict[str, str]], host: Host) -> tuple[int | None, ...]:
    sockets = number(fields.get("Socket(s)"))
    per_socket = number(fields.get("Core(s) per socket"))
    if sockets and per_socket:
        return sockets, sockets * per_socket, number(fields.get("Thread(s) per core"))
    cores = {(block["physical id"], block["core id"]) for block in blocks if block.keys() >= {"physical id", "core id"}}
    packages = {package for package, _ in cores}
    threads = len(blocks)
    if not cores:
        topologies = host.glob(f"{_CPUS}/cpu[0-9]*/topology")
        siblings = [host.text(f"{folder}/thread_siblings_list") for folder in topologies]
        cores = {(text, "") for text in siblings if text}
        # Some ARM firmware states no package and the kernel shows -1.
        packages = {text for folder in topologies if (text := host.text(f"{folder}/physical_package_id"))} - {"-1\n"}
        threads = len(topologies)
    if not cores:
        return None, None, None
    return len(packages) or None, len(cores), threads // len(cores) or None


def _sysfs_l3(host: Host) -> int | None:
    instances: dict[str, int] = {}
    for folder in host.glob(f"{_CPUS}/cpu[0-9]*/cache/index3"):
        if number(host.text(f"{folder}/level")) != 3:
            continue
        size = re.fullmatch(r"(\d+)K", (host.text(f"{folder}/size") or "").strip())
        if size:
            instances[host.text(f"{folder}/shared_cpu_list") or folder] = int(size[1]) * 1024
    return sum(instances.values()) or None


def _cpuinfo_flags(blocks: list[dict[str, str]]) -> set[str]:
    return set((blocks[0].get("flags") or blocks[0].get("Features") or "").split()) if blocks else set()


def _cpuinfo_model(blocks: list[dict[str, str]]) -> str | None:
    return (blocks[0].get("model name") or blocks[0].get("Processor")) if blocks else None


def _notes(cpu: Cpu, host: Host) -> list[Note]:
    if cpu.cores is None:
        return [Note("cpu.cores", "neither lscpu nor /proc/cpuinfo nor sysfs tells: apt-get install util-linux")]
    online = parse_numbers(host.text(f"{_CPUS}/online") or "")
    if cpu.threads_per_core and len(online) not in (0, cpu.cores * cpu.threads_per_core):
        return [
            Note(
                "cpu.threads_per_core",
                f"{len(online)} logical CPUs are online, not {cpu.cores} x {cpu.threads_per_core}: "
                "cores of two kinds, or some are switched off; lscpu --extended shows each",
            )
        ]
    return []
