"""What every dialect shares: a command, the line it is written on, and the words llama.cpp and its fork agree about."""

from dataclasses import dataclass, field

from tokenmill.errors import UsageError
from tokenmill.launch.binding import binding
from tokenmill.launch.flag_sets import FlagSet
from tokenmill.launch.layers import gpu_order, layer_flags
from tokenmill.launch.tensor_patterns import patterns
from tokenmill.planner.placement import usable_gpus
from tokenmill.planner.plan import Command, Plan
from tokenmill.planner.speed.offload import set_rows
from tokenmill.units import MIB

DEVICE_NAMES = {"nvidia": "CUDA", "amd": "ROCm", "intel": "SYCL"}
VISIBLE = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"}


@dataclass(slots=True)
class CommandLine:
    """A command line in the making; every flag is checked against the version that will run."""

    flags: FlagSet
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, flag: str, *values: object) -> None:
        """Append a flag; FlagUnknown where the version lacks it."""
        self.argv += [self.flags.require(flag), *map(str, values)]

    def add_if_known(self, flag: str, *values: object) -> None:
        """Append a flag whose absence changes nothing that the plan counts on."""
        if self.flags.has(flag):
            self.add(flag, *values)

    def note(self, text: str) -> None:
        """Keep a reason for the reader."""
        self.notes.append(text)

    def done(self) -> Command:
        """The finished command."""
        return Command(tuple(self.argv), dict(self.env), tuple(self.notes))


def serve_words(line: CommandLine, plan: Plan, model: str, host: str, port: int) -> None:
    """Model, address, context, batches and threads: the same in llama.cpp and ik_llama.cpp."""
    settings = plan.settings
    line.add("--model", model)
    line.add("--alias", plan.profile.name)
    line.add("--host", host)
    line.add("--port", port)
    line.add("--ctx-size", settings.cells)
    line.add("--parallel", settings.sequences)
    if settings.sequences > 1:
        line.note(f"--ctx-size is for all {settings.sequences} slots together: {settings.context} tokens each")
    line.add("--batch-size", settings.batch)
    line.add("--ubatch-size", settings.ubatch)
    line.add("--threads", settings.threads)
    line.add("--threads-batch", settings.threads_batch)


def cache_words(line: CommandLine, plan: Plan, known_types: tuple[str, ...]) -> None:
    """Cache types, flash attention and the host prompt cache."""
    settings = plan.settings
    for flag, value in (("--cache-type-k", settings.cache_type_k), ("--cache-type-v", settings.cache_type_v)):
        if value.lower() not in known_types:
            raise UsageError(
                f"{line.flags.version} has no cache type {value}",
                hint=f"it has {', '.join(known_types)}" + ("; q6_0 is ik_llama.cpp's" if value == "q6_0" else ""),
            )
        line.add(flag, value)
    if line.flags.takes_value("--flash-attn"):
        line.add("--flash-attn", "on" if settings.flash_attention else "off")
    elif settings.flash_attention:
        line.add("--flash-attn")
    # never left out: the default is 8 GiB that no ledger knows of
    line.add("--cache-ram", settings.cache_ram_bytes // MIB)


def load_words(line: CommandLine, plan: Plan) -> None:
    """How weights get into memory; one flag since July 2026, several before."""
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


def placement_words(line: CommandLine, plan: Plan, *, output_first: bool) -> None:
    """-ngl, -ts and -ot for the plan's placement."""
    if not plan.placement.gpus:
        if plan.machine.gpus:
            line.add("--device", "none")
            line.note(
                "--device none: without it even -ngl 0 takes GPU memory and copies weights over for large batches"
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


def numa_words(line: CommandLine, plan: Plan) -> None:
    """Tell the engine that its processors were chosen for it."""
    if binding(plan).numa:
        line.add_if_known("--numa", "numactl")


def device_names(plan: Plan) -> dict[str, str]:
    """Names the engine gives to the GPUs it sees, in the order it sees them."""
    return {tier: f"{DEVICE_NAMES[_vendor(plan)]}{index}" for index, tier in enumerate(_gpus_seen(plan))}


def visible_gpus(plan: Plan) -> dict[str, str]:
    """Environment that shows the engine the plan's GPUs, and in its order."""
    seen = [int(tier[3:]) for tier in _gpus_seen(plan)]
    present = [gpu.index for gpu in plan.machine.gpus]
    env: dict[str, str] = {}
    if len(present) > 1 and seen and _vendor(plan) == "nvidia":
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # else CUDA numbers the fastest card 0, and nvidia-smi another
    if seen and seen != present and _vendor(plan) in VISIBLE:
        env[VISIBLE[_vendor(plan)]] = ",".join(map(str, seen))
    return env


def offload_floor(plan: Plan) -> int | None:
    """Rows from which host products may move to the GPU, where the plan says so: see `plan.offload`."""
    return set_rows(plan.machine, plan.profile, plan.settings, plan.placement, plan.settings.offload_min_batch)


def _gpus_seen(plan: Plan) -> tuple[str, ...]:
    if plan.settings.engine == "vllm":
        return usable_gpus(plan.machine, plan.goal)[: plan.settings.tensor_parallel]
    if plan.goal.own_fit and not plan.goal.cpu_only:
        chosen = plan.goal.gpus if plan.goal.gpus is not None else [gpu.index for gpu in plan.machine.gpus]
        return tuple(f"gpu{index}" for index in chosen)
    return gpu_order(plan.placement)


def _vendor(plan: Plan) -> str:
    used = {int(tier[3:]) for tier in _gpus_seen(plan)}
    return next((gpu.vendor for gpu in plan.machine.gpus if gpu.index in used and gpu.vendor), "nvidia")
