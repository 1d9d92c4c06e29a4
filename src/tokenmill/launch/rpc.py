"""Commands for llama.cpp over several hosts: `ggml-rpc-server` on workers, `llama-server --rpc` on the main host.

The main host (`head`) sees a worker's devices as GPUs: RPC0, RPC1 ... in the order of --rpc and, per server, of its
--device. --override-tensor names them RPCn[host:port], with n counted per server; so --rpc must precede both. The
server has no authentication and never listens on all interfaces.
"""

import ipaddress
import shlex
from dataclasses import dataclass

from tokenmill.errors import UsageError
from tokenmill.launch.dialect import (
    DEVICE_NAMES,
    CommandLine,
    add_cache_flags,
    add_load_flags,
    add_numa_flags,
    add_serve_flags,
    device_names,
    visible_gpus,
)
from tokenmill.launch.flag_sets import FlagSet
from tokenmill.launch.layers import layer_flags
from tokenmill.launch.llama_cpp import CACHE_TYPES, OUTPUT_FIRST
from tokenmill.launch.tensor_patterns import patterns
from tokenmill.model.profile import TOKEN_EMBEDDINGS
from tokenmill.planner.multi_host.hosts import HostShare, HostsPlan
from tokenmill.planner.plan import Command, Placement

SERVER = "ggml-rpc-server"  # rpc-server before 2026
CPU = "CPU"


@dataclass(frozen=True, slots=True)
class HostCommand:
    """A command to run on one host."""

    host: str
    role: str  # worker, head, ray head, ray worker
    command: Command


@dataclass(frozen=True, slots=True)
class _Device:
    """One device as llama.cpp on the main host sees it."""

    tier: str  # HOST/TIER in the plan
    name: str  # for --device
    buffer: str  # for --override-tensor


def spell(
    plan: HostsPlan, *, model: str, host: str, port: int, binary: str | None, flags: FlagSet, server: str | None = None
) -> tuple[HostCommand, ...]:
    """The commands of every worker, then of the main host."""
    found = [HostCommand(share.host.name, "worker", _worker(share, server)) for share in plan.workers]
    head = plan.head_plan
    line = CommandLine(flags, [binary or "llama-server"])
    add_serve_flags(line, head, model, host, port)
    if plan.workers:
        line.add("--rpc", ",".join(share.host.endpoint for share in plan.workers))
    add_cache_flags(line, head, CACHE_TYPES)
    add_load_flags(line, head)
    if not head.settings.repack:
        line.add("--no-repack")
    if line.flags.has("--fit"):
        line.add("--fit", "off")
    _place(line, plan)
    add_numa_flags(line, head)
    line.add_if_known("--jinja")
    line.add_if_known("--metrics")
    line.env |= visible_gpus(head)
    return (*found, HostCommand(plan.fleet.head.name, "head", line.done()))


def _worker(share: HostShare, server: str | None) -> Command:
    argv = [*shlex.split(server or SERVER), "--host", share.host.address, "--port", str(share.host.port)]
    devices = _tiers(share)
    if any(tier.startswith("gpu") for tier in devices):
        argv += ["--device", ",".join(_local_name(share, tier) for tier in devices)]
    argv += ["--threads", str(share.settings.threads), "--cache"]
    notes = (
        "--host: the RPC server has no authentication or encryption, so it listens only on this private address",
        *_numeric(share),
        "--cache: stores tensors over 10 MiB on this host's disk (LLAMA_CACHE), so that later loads do not send them",
    )
    cards = sum(gpu.vendor in ("nvidia", None) for gpu in share.host.machine.gpus)
    env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if cards > 1 and share.placement.gpus else {}
    return Command(tuple(argv), env, notes)


def _numeric(share: HostShare) -> tuple[str, ...]:
    """A note if the address is a name: the server needs a numeric IPv4 address. UsageError for IPv6."""
    try:
        found = ipaddress.ip_address(share.host.address)
    except ValueError:
        return (f"--host needs a numeric IPv4 address: replace it with the private address of {share.host.name}",)
    if found.version != 4:
        raise UsageError(
            f"llama.cpp's RPC does not support IPv6 (address of {share.host.name}: {found})", hint="use an IPv4 address"
        )
    return ()


def _tiers(share: HostShare) -> tuple[str, ...]:
    """A worker's tiers in use: its GPUs, then the memory of its CPU."""
    used = {*share.placement.homes, *share.placement.layers}
    host = sorted(tier for tier in used if not tier.startswith("gpu"))
    return (*share.placement.gpus, *host[:1])


def _local_name(share: HostShare, tier: str) -> str:
    """Name of a device on its own host."""
    if not tier.startswith("gpu"):
        return CPU
    vendor = next((gpu.vendor for gpu in share.host.machine.gpus if f"gpu{gpu.index}" == tier and gpu.vendor), "nvidia")
    return f"{DEVICE_NAMES[vendor]}{tier[3:]}"


def _devices(plan: HostsPlan) -> list[_Device]:
    """All devices except the main host's CPU."""
    found: list[_Device] = []
    for share in plan.workers:
        for index, tier in enumerate(_tiers(share)):
            name = f"RPC{len(found)}"
            found.append(_Device(f"{share.host.name}/{tier}", name, f"RPC{index}[{share.host.endpoint}]"))
    head = plan.fleet.head.name
    return [*found, *(_Device(f"{head}/{tier}", name, name) for tier, name in device_names(plan.head_plan).items())]


def _place(line: CommandLine, plan: HostsPlan) -> None:
    """Add -ngl, -ts and -ot over all devices, each of which counts as a GPU, numbered as listed here."""
    devices = _devices(plan)
    if not devices:
        line.add("--n-gpu-layers", 0)
        return
    seen = {device.tier: f"gpu{index}" for index, device in enumerate(devices)}
    fleet = plan.placement()
    placement = Placement(
        tuple(seen.get(home, "dram") for home in fleet.homes),
        tuple(seen.get(tier, "dram") for tier in fleet.layers),
        seen.get(fleet.head, "dram"),
    )
    flags = layer_flags(placement, plan.profile, output_first=OUTPUT_FIRST)
    line.add("--device", ",".join(devices[int(gpu[3:])].name for gpu in flags.gpus))
    line.add("--n-gpu-layers", flags.gpu_layers)
    if flags.tensor_split:
        line.add("--tensor-split", ",".join(map(str, flags.tensor_split)))
    buffers = {f"gpu{index}": device.buffer for index, device in enumerate(devices)}
    clauses = [(regex, buffers.get(tier, CPU)) for regex, tier in patterns(placement, plan.profile)]
    output_last = placement.layers[-1] == placement.head
    if plan.profile.tied_output and not output_last:
        # the output shares the embedding table; without an override, the last device gets a second copy
        clauses += [(rf"^{name.replace('.', chr(92) + '.')}$", CPU) for name in TOKEN_EMBEDDINGS[:1]]
    if clauses:
        line.add("--override-tensor", ",".join(f"{regex}={buffer}" for regex, buffer in clauses))
    if not output_last:
        line.note(
            "the output layer is on the main host: a worker would send all logits over the network for every token"
        )
