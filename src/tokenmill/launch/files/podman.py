"""A shell script around `podman run`, published on loopback only."""

import shlex

from tokenmill.launch.files.launch import SHARED_MEMORY, Launch
from tokenmill.launch.files.shell import heading, joined, words
from tokenmill.units import GIB


def write(launch: Launch) -> str:
    """The script."""
    bound = launch.binding
    mount = launch.mount
    options = [
        "--rm",
        f"--name {launch.name}",
        *(["--device nvidia.com/gpu=all"] if launch.gpus else []),
        f"--publish 127.0.0.1:{launch.port}:{launch.port}",
        f"--shm-size {SHARED_MEMORY}",
        *(f"--cap-add={name}" for name in launch.capabilities),
        *(["--ulimit memlock=-1:-1"] if launch.mlock else []),
        *([f"--cpuset-cpus {bound.cpu_list}"] if bound.cpus else []),
        *([f"--cpuset-mems {bound.node_list}"] if bound.nodes else []),
        f"--memory {bound.memory_max_bytes // GIB}g",
        *(f"--env {shlex.quote(f'{name}={value}')}" for name, value in launch.command.env.items()),
        f"--volume {_volume(mount.source, mount.inside)}",
        f"--health-cmd {shlex.quote(health_command(launch))}",
        "--health-interval 30s",
        "--health-timeout 10s",
        "--health-retries 3",
        f"--health-start-period {launch.load_s}s",
        *(["--entrypoint vllm"] if launch.vllm else []),
        launch.image + (" serve" if launch.vllm else ""),
        *map(words, launch.arguments()),
    ]
    entry = None if launch.vllm else "the image's entry point must be llama-server, as in llama.cpp's own server images"
    # podman has no daemon, so the container inherits the memory policy of the command that starts it
    spread = "numactl --interleave=all " if bound.interleave else ""
    return "\n".join([*heading(launch, entry, mount.note), joined([f"exec {spread}podman run", *options])]) + "\n"


def health_command(launch: Launch) -> str:
    """What runs inside the container."""
    return f"curl --fail --silent --max-time 5 {launch.health_url} || exit 1"


def _volume(source: str, inside: str) -> str:
    if source.startswith("~/"):
        return f'"$HOME"/{shlex.quote(source[2:])}:{inside}:Z'
    return shlex.quote(f"{source}:{inside}:ro,Z")
