"""Reads CPU facts from lscpu, or from /proc/cpuinfo and sysfs if lscpu is not installed. Ignores clock rates."""

import json
import re
from collections.abc import Iterable
from typing import Any

from tokenmill.hardware.host import Host, number
from tokenmill.hardware.machine import ISA_THAT_MATTERS, Cpu, Note
from tokenmill.units import parse_bytes, parse_ranges

# Linux's name -> name in ISA_THAT_MATTERS
_ISA_ALIASES = {"asimd": "neon", "asimddp": "dotprod", "avx512vbmi": "avx512_vbmi"}
_CPUS = "/sys/devices/system/cpu"


def read_cpu(host: Host) -> tuple[Cpu, str | None, list[Note]]:
    """Return the CPUs, the name of the hypervisor (None on bare metal), and notes."""
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
        # sysfs first, because lscpu rounds 24.75 MiB to 24.8
        l3_bytes=_sysfs_l3(host) or cache_total(fields.get("L3 cache") or fields.get("L3") or ""),
    )
    virtual = fields.get("Hypervisor vendor") or ("unnamed hypervisor" if "hypervisor" in flags else None)
    return cpu, virtual, _notes(cpu, host)


def parse_lscpu(text: str) -> dict[str, str]:
    """Parse `lscpu -J` into field names without colon -> data; nested fields are flattened, empty ones dropped."""
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
        # with big.LITTLE the fields repeat for each kind of core; the first kind counts
        if name not in found and data not in ("", "-"):
            found[name] = data
        waiting = [*_entries(entry, "children"), *waiting]
    return found


def parse_cpuinfo(text: str) -> list[dict[str, str]]:
    """Parse /proc/cpuinfo into one mapping per logical CPU."""
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        pairs = (line.partition(":") for line in block.splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, _, value in pairs}
        if "processor" in fields:
            blocks.append(fields)
    return blocks


def isa(flags: Iterable[str]) -> tuple[str, ...]:
    """The flags in `ISA_THAT_MATTERS`, under the names used there."""
    have = {_ISA_ALIASES.get(flag, flag) for flag in flags}
    return tuple(flag for flag in ISA_THAT_MATTERS if flag in have)


def cache_total(text: str) -> int | None:
    """Parse `512 MiB (16 instances)`; None for older lscpu versions, which print the size of one instance."""
    match = re.fullmatch(r"([\d.]+ [KMG]iB) \(\d+ instances?\)", text.strip())
    return parse_bytes(match[1]) if match else None


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
        # some ARM firmware reports no package, which the kernel shows as -1
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
        return [
            Note("cpu.cores", "not in /proc/cpuinfo or sysfs, and lscpu does not report it: apt-get install util-linux")
        ]
    online = parse_ranges(host.text(f"{_CPUS}/online") or "")
    if cpu.threads_per_core and len(online) not in (0, cpu.cores * cpu.threads_per_core):
        return [
            Note(
                "cpu.threads_per_core",
                f"{len(online)} logical CPUs are online, not {cpu.cores} x {cpu.threads_per_core}: "
                "there are two kinds of cores, or some are offline; see lscpu --extended",
            )
        ]
    return []
