"""vLLM over several hosts: a Ray cluster of all of them, then `vllm serve` on its head.

Ray runs whatever it is sent. Its token (Ray 2.52 or later) keeps strangers out but encrypts nothing, so addresses are
private ones all the same.
"""

from dataclasses import replace

from tokenmill.hardware.fleet import Host
from tokenmill.launch import vllm
from tokenmill.launch.flagset import FlagSet
from tokenmill.launch.rpc import HostCommand
from tokenmill.planner.multi_host.hosts import HostsPlan
from tokenmill.planner.plan import Command

RAY_PORT = 6379
AUTH = {"RAY_AUTH_MODE": "token"}


def spell(
    plan: HostsPlan, *, model: str, host: str, port: int, binary: str | None, flags: FlagSet
) -> tuple[HostCommand, ...]:
    """Ray on the head, Ray on every other host, then the engine."""
    head = plan.fleet.head
    found = [HostCommand(head.name, "ray head", _ray_head(head))]
    found += [HostCommand(other.name, "ray worker", _ray_worker(other, head)) for other in plan.fleet.hosts[1:]]
    serve = vllm.spell(plan.head_plan, model=model, host=host, port=port, binary=binary, flags=flags)
    extra = (
        flags.require("--pipeline-parallel-size"),
        str(plan.pipeline_parallel),
        flags.require("--distributed-executor-backend"),
        "ray",
    )
    env = {name: value for name, value in serve.env.items() if not name.endswith("_VISIBLE_DEVICES")}
    notes = (
        *serve.notes,
        f"{model} must be there under the same path on every host",
        "NCCL_SOCKET_IFNAME=INTERFACE on every host, where it has several networks",
    )
    serve = replace(serve, argv=(*serve.argv, *extra), env={**env, **AUTH, "VLLM_HOST_IP": head.address}, notes=notes)
    return (*found, HostCommand(head.name, "head", serve))


def _ray_head(head: Host) -> Command:
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
    notes = (
        "RAY_AUTH_MODE=token: ray get-auth-token --generate makes a token once; copy ~/.ray/auth_token to every host",
    )
    return Command(argv, {**AUTH, "VLLM_HOST_IP": head.address}, notes)


def _ray_worker(host: Host, head: Host) -> Command:
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
