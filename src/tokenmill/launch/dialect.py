"""The command-line builder of all dialects, and the flags that llama.cpp and ik_llama.cpp share."""

from dataclasses import dataclass, field

from tokenmill.errors import UsageError
from tokenmill.launch.binding import binding
from tokenmill.launch.flag_sets import FlagSet
from tokenmill.launch.layers import gpu_order, layer_flags
from tokenmill.launch.tensor_patterns import patterns
from tokenmill.planner.placement import usable_gpus
from tokenmill.planner.plan import Command, Plan
from tokenmill.planner.speed.offload import choose_min_batch
from tokenmill.units import MIB

DEVICE_NAMES = {"nvidia": "CUDA", "amd": "ROCm", "intel": "SYCL"}
VISIBLE = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"}


@dataclass(slots=True)
class CommandLine:
    """Builder of a command line; checks every flag against the engine version."""

    flags: FlagSet
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, flag: str, *values: object) -> None:
        """Append a flag; raises FlagUnknown if the version lacks it."""
        self.argv += [self.flags.require(flag), *map(str, values)]

    def add_if_known(self, flag: str, *values: object) -> None:
        """Append an optional flag, which the plan does not depend on, if the version has it."""
        if self.flags.has(flag):
            self.add(flag, *values)

    def note(self, text: str) -> None:
        """Record an explanation for the user."""
        self.notes.append(text)

    def done(self) -> Command:
        """The finished command."""
        return Command(tuple(self.argv), dict(self.env), tuple(self.notes))


def add_serve_flags(line: CommandLine, plan: Plan, model: str, host: str, port: int) -> None:
    """Add model, address, context, batch sizes and threads."""
    settings = plan.settings
    line.add("--model", model)
    line.add("--alias", plan.profile.name)
    line.add("--host", host)
    line.add("--port", port)
    line.add("--ctx-size", settings.cells)
    line.add("--parallel", settings.sequences)
    if settings.sequences > 1:
        line.note(f"--ctx-size is the total of {settings.sequences} slots, {settings.context} tokens each")
    line.add("--batch-size", settings.batch)
    line.add("--ubatch-size", settings.ubatch)
    line.add("--threads", settings.threads)
    line.add("--threads-batch", settings.threads_batch)


def add_cache_flags(line: CommandLine, plan: Plan, known_types: tuple[str, ...]) -> None:
    """Add cache types, flash attention and the size of the host prompt cache."""
    settings = plan.settings
    for flag, value in (("--cache-type-k", settings.cache_type_k), ("--cache-type-v", settings.cache_type_v)):
        if value.lower() not in known_types:
            raise UsageError(
                f"{line.flags.version} has no cache type {value}",
                hint=f"use {', '.join(known_types)}" + ("; q6_0 is only in ik_llama.cpp" if value == "q6_0" else ""),
            )
        line.add(flag, value)
    if line.flags.takes_value("--flash-attn"):
        line.add("--flash-attn", "on" if settings.flash_attention else "off")
    elif settings.flash_attention:
        line.add("--flash-attn")
    # always set, because the ledger does not count the default of 8 GiB
    line.add("--cache-ram", settings.cache_ram_bytes // MIB)


def add_load_flags(line: CommandLine, plan: Plan) -> None:
    """Add the flags for loading weights: --load-mode since July 2026, several flags before."""
    mmap = plan.settings.mmap
    mlock = plan.settings.mlock
    if line.flags.has("--load-mode"):
        line.add(
            "--load-mode",
            {(True, True): "mmap+mlock", (True, False): "mmap", (False, True): "mlock", (False, False): "none"}[
                mmap, mlock
            ],
        )
        return
    if not mmap:
        line.add("--no-mmap")
    if mlock:
        line.add("--mlock")


def add_placement_flags(line: CommandLine, plan: Plan, *, output_first: bool) -> None:
    """Add -ngl, -ts and -ot for the plan's placement."""
    if not plan.placement.gpus:
        if plan.machine.gpus:
            line.add("--device", "none")
            line.note(
                "--device none: otherwise -ngl 0 still uses GPU memory, and copies weights to the GPU for large batches"
            )
        line.add("--n-gpu-layers", 0)
        return
    flags = layer_flags(plan.placement, plan.profile, output_first=output_first)
    line.add("--n-gpu-layers", flags.gpu_layers)
    if flags.tensor_split:
        line.add("--tensor-split", ",".join(map(str, flags.tensor_split)))
    clauses = patterns(plan.placement, plan.profile, output_first=output_first)
    if clauses:
        names = device_names(plan)
        line.add("--override-tensor", ",".join(f"{regex}={names.get(tier, 'CPU')}" for regex, tier in clauses))


def add_numa_flags(line: CommandLine, plan: Plan) -> None:
    """Add --numa numactl if the launcher sets the NUMA policy."""
    if binding(plan).numa:
        line.add_if_known("--numa", "numactl")


def device_names(plan: Plan) -> dict[str, str]:
    """The engine's names of the visible GPUs, in its order."""
    return {tier: f"{DEVICE_NAMES[_vendor(plan)]}{index}" for index, tier in enumerate(_used_gpu_tiers(plan))}


def visible_gpus(plan: Plan) -> dict[str, str]:
    """Environment that makes the plan's GPUs visible to the engine, in the plan's order."""
    indices = [int(tier[3:]) for tier in _used_gpu_tiers(plan)]
    present = [gpu.index for gpu in plan.machine.gpus]
    env: dict[str, str] = {}
    if len(present) > 1 and indices and _vendor(plan) == "nvidia":
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # CUDA's default order is by speed, unlike nvidia-smi's
    if indices and indices != present and _vendor(plan) in VISIBLE:
        env[VISIBLE[_vendor(plan)]] = ",".join(map(str, indices))
    return env


def offload_floor(plan: Plan) -> int | None:
    """Minimum batch of host matrix products that are offloaded to the GPU; None: the engine's default."""
    return choose_min_batch(plan.machine, plan.profile, plan.settings, plan.placement, plan.settings.offload_min_batch)


def _used_gpu_tiers(plan: Plan) -> tuple[str, ...]:
    if plan.settings.engine == "vllm":
        return usable_gpus(plan.machine, plan.goal)[: plan.settings.tensor_parallel]
    if plan.goal.own_fit and not plan.goal.cpu_only:
        chosen = plan.goal.gpus if plan.goal.gpus is not None else [gpu.index for gpu in plan.machine.gpus]
        return tuple(f"gpu{index}" for index in chosen)
    return gpu_order(plan.placement)


def _vendor(plan: Plan) -> str:
    used = {int(tier[3:]) for tier in _used_gpu_tiers(plan)}
    return next((gpu.vendor for gpu in plan.machine.gpus if gpu.index in used and gpu.vendor), "nvidia")
