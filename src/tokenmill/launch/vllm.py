"""Command lines for `vllm serve`, alone and on a Ray cluster."""

import shlex
from dataclasses import replace

from tokenmill.errors import UsageError
from tokenmill.hardware.fleet import FleetHost
from tokenmill.launch.binding import binding
from tokenmill.launch.dialect import CommandLine, visible_gpus
from tokenmill.launch.flag_sets import FlagSet
from tokenmill.launch.rpc import HostCommand
from tokenmill.planner.multi_host.hosts import HostsPlan
from tokenmill.planner.plan import Command, Plan
from tokenmill.units import GIB

CACHE_TYPES = {
    "auto": "auto",
    "f16": "auto",
    "bf16": "auto",
    "float16": "auto",
    "bfloat16": "auto",
    "fp8": "fp8",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "f8_e4m3": "fp8_e4m3",
    "f8_e5m2": "fp8_e5m2",
    "nvfp4": "nvfp4",
}
CPU_BLOCK = 32  # tokens per page; the CPU backend requires multiples of 32


def spell(plan: Plan, *, model: str, host: str, port: int, binary: str | None, flags: FlagSet) -> Command:
    """The vllm serve command for a plan."""
    settings = plan.settings
    on_gpu = bool(plan.placement.gpus)
    program = shlex.split(binary or "vllm")
    serves = program[-1].rsplit("/", 1)[-1] == "vllm"
    line = CommandLine(flags, [*program, "serve", model] if serves else [*program, "--model", model])
    line.add("--served-model-name", plan.profile.name)
    line.add("--host", host)
    line.add("--port", port)
    line.add("--max-model-len", settings.context)
    line.add("--max-num-seqs", settings.sequences)
    if plan.goal.batch is not None:
        line.add("--max-num-batched-tokens", settings.batch)
    line.add("--kv-cache-dtype", _cache_type(line, plan))
    line.add("--enable-prefix-caching")
    line.add_if_known("--enable-prompt-tokens-details")  # reports the number of reused prompt tokens
    if on_gpu:
        line.add("--gpu-memory-utilization", f"{settings.gpu_memory_utilization:g}")
        line.add("--tensor-parallel-size", settings.tensor_parallel)
        _offload(line, plan)
    else:
        _processors(line, plan)
    line.env |= visible_gpus(plan)
    line.env["VLLM_NO_USAGE_STATS"] = "1"
    if model.startswith(("/", "./", "../", "~")):
        line.env["HF_HUB_OFFLINE"] = "1"  # a local folder needs no network access
    return line.done()


def _processors(line: CommandLine, plan: Plan) -> None:
    """Add the options that limit memory on CPUs."""
    line.add("--block-size", CPU_BLOCK)
    cache = sum(row.bytes for row in plan.ledger.full_context if row.item == "kv")
    if cache:
        line.add("--kv-cache-memory-bytes", cache)
        line.note("--kv-cache-memory-bytes: otherwise vLLM uses nearly all host memory for its KV cache")
    line.add("--enforce-eager")
    line.note("--enforce-eager: avoids compiled kernels, which need a C++ compiler")
    line.env["VLLM_CPU_OMP_THREADS_BIND"] = binding(plan).cpu_list or "auto"


def _cache_type(line: CommandLine, plan: Plan) -> str:
    wanted = plan.settings.cache_type_k
    if wanted not in CACHE_TYPES or plan.settings.cache_type_v != wanted:
        raise UsageError(
            f"{line.flags.version} does not support the cache types K {wanted}, V {plan.settings.cache_type_v}",
            hint="use the same type for both: f16, bf16 or fp8",
        )
    return CACHE_TYPES[wanted]


def _offload(line: CommandLine, plan: Plan) -> None:
    """Offload the weights that the plan keeps on the host while GPUs compute, except embeddings."""
    tensors = zip(plan.profile.tensors, plan.placement.homes, strict=True)
    away = sum(tensor.bytes for tensor, home in tensors if not home.startswith("gpu") and tensor.layer is not None)
    if away:
        line.add("--cpu-offload-gb", -(-away // GIB))
        line.note("--cpu-offload-gb: these weights are copied over PCIe at every step")


RAY_PORT = 6379
AUTH = {"RAY_AUTH_MODE": "token"}


def spell_cluster(
    plan: HostsPlan, *, model: str, host: str, port: int, binary: str | None, flags: FlagSet
) -> tuple[HostCommand, ...]:
    """Commands for Ray on the main host, Ray on every other host, then the engine."""
    head = plan.fleet.head
    found = [HostCommand(head.name, "ray head", _ray_head(head))]
    found += [HostCommand(other.name, "ray worker", _ray_worker(other, head)) for other in plan.fleet.hosts[1:]]
    serve = spell(plan.head_plan, model=model, host=host, port=port, binary=binary, flags=flags)
    extra = (
        flags.require("--pipeline-parallel-size"),
        str(plan.pipeline_parallel),
        flags.require("--distributed-executor-backend"),
        "ray",
    )
    env = {name: value for name, value in serve.env.items() if not name.endswith("_VISIBLE_DEVICES")}
    notes = (
        *serve.notes,
        f"{model} must be at the same path on every host",
        "set NCCL_SOCKET_IFNAME=INTERFACE on hosts with several networks",
    )
    serve = replace(serve, argv=(*serve.argv, *extra), env={**env, **AUTH, "VLLM_HOST_IP": head.address}, notes=notes)
    return (*found, HostCommand(head.name, "head", serve))


def _ray_head(head: FleetHost) -> Command:
    argv = (
        "ray",
        "start",
        "--head",
        "--node-ip-address",
        head.address,
        "--port",
        str(RAY_PORT),
        "--dashboard-host",
        "127.0.0.1",
        "--disable-usage-stats",
    )
    notes = ("RAY_AUTH_MODE=token: run ray get-auth-token --generate once, and copy ~/.ray/auth_token to every host",)
    return Command(argv, {**AUTH, "VLLM_HOST_IP": head.address}, notes)


def _ray_worker(host: FleetHost, head: FleetHost) -> Command:
    argv = (
        "ray",
        "start",
        "--address",
        f"{head.address}:{RAY_PORT}",
        "--node-ip-address",
        host.address,
        "--disable-usage-stats",
    )
    return Command(argv, {**AUTH, "VLLM_HOST_IP": host.address})
