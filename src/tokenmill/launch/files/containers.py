"""Launch files for containers: `podman run`, a podman quadlet, docker compose. All publish on loopback only."""

import json
import shlex

from tokenmill.launch.files.launch import SHARED_MEMORY, Launch
from tokenmill.launch.files.services import continued, heading, joined, quoted, specifiers, words
from tokenmill.units import GIB


def write_podman(launch: Launch) -> str:
    """Write a shell script with `podman run`."""
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
    entry = None if launch.vllm else "the image's entry point must be llama-server, as in llama.cpp's server images"
    # podman has no daemon, so the container inherits the memory policy of its caller
    interleave = "numactl --interleave=all " if bound.interleave else ""
    return "\n".join([*heading(launch, entry, mount.note), joined([f"exec {interleave}podman run", *options])]) + "\n"


def health_command(launch: Launch) -> str:
    """The health check that runs inside the container."""
    return f"curl --fail --silent --max-time 5 {launch.health_url} || exit 1"


def _volume(source: str, inside: str) -> str:
    if source.startswith("~/"):
        return f'"$HOME"/{shlex.quote(source[2:])}:{inside}:Z'
    return shlex.quote(f"{source}:{inside}:ro,Z")


def write_quadlet(launch: Launch) -> str:
    """Write a podman quadlet (.container file)."""
    bound = launch.binding
    mount = launch.mount
    arguments = [[quoted(word) for word in group] for group in launch.arguments()]
    podman = [
        *([f"--cpuset-cpus={bound.cpu_list}"] if bound.cpus else []),
        *([f"--cpuset-mems={bound.node_list}"] if bound.nodes else []),
        f"--memory={bound.memory_max_bytes // GIB}g",
        *(["--entrypoint=vllm"] if launch.vllm else []),
    ]
    source = f"%h/{specifiers(mount.source[2:])}" if mount.source.startswith("~/") else specifiers(mount.source)
    options = "Z" if mount.source.startswith("~/") else "ro,Z"
    lines = [
        f"# ~/.config/containers/systemd/{launch.name}.container, then: systemctl --user daemon-reload",
        *(f"# {comment}" for comment in launch.comments),
        *([f"# {mount.note}"] if mount.note else []),
        "[Unit]",
        f"Description={specifiers(launch.title)}",
        "",
        "[Container]",
        f"ContainerName={launch.name}",
        f"Image={launch.image}",
        *(["AddDevice=nvidia.com/gpu=all"] if launch.gpus else []),
        f"PublishPort=127.0.0.1:{launch.port}:{launch.port}",
        f"ShmSize={SHARED_MEMORY}",
        f"AddCapability={' '.join(launch.capabilities)}",
        *(["Ulimit=memlock=-1:-1"] if launch.mlock else []),
        f"Volume={source}:{mount.inside}:{options}",
        *(f"Environment={quoted(f'{name}={value}', variables=False)}" for name, value in launch.command.env.items()),
        f"HealthCmd={health_command(launch)}",
        "HealthInterval=30s",
        "HealthTimeout=10s",
        "HealthRetries=3",
        f"HealthStartPeriod={launch.load_s}s",
        "HealthOnFailure=kill",
        f"PodmanArgs={' '.join(podman)}",
        "Exec=" + continued([["serve"], *arguments] if launch.vllm else arguments),
        "",
        "[Service]",
        "Restart=on-failure",
        "RestartSec=10",
        f"TimeoutStartSec={launch.load_s}",
        *(["NUMAPolicy=interleave", "NUMAMask=all"] if bound.interleave else []),
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def write_compose(launch: Launch) -> str:
    """Write a docker compose file."""
    bound = launch.binding
    mount = launch.mount
    source = f"${{HOME}}/{mount.source[2:]}" if mount.source.startswith("~/") else _text(mount.source)[1:-1]
    volume = f"{source}:{mount.inside}" + ("" if mount.source.startswith("~/") else ":ro,Z")
    lines = [
        f"# {launch.title}",
        *(f"# {comment}" for comment in launch.comments),
        *([f"# {mount.note}"] if mount.note else []),
        *(["# compose cannot interleave memory over NUMA nodes; podman and systemd can"] if bound.interleave else []),
        "services:",
        f"  {launch.name}:",
        f"    image: {_text(launch.image)}",
        *(["    entrypoint: [vllm, serve]"] if launch.vllm else []),
        "    command: [",
        *(f"      {', '.join(map(_text, group))}," for group in launch.arguments()),
        "    ]",
        *_environment(launch),
        f'    ports: ["127.0.0.1:{launch.port}:{launch.port}"]',
        f'    volumes: ["{volume}"]',
        f"    shm_size: {SHARED_MEMORY}",
        f"    cap_add: [{', '.join(launch.capabilities)}]",
        *(["    ulimits: {memlock: {soft: -1, hard: -1}}"] if launch.mlock else []),
        *([f'    cpuset: "{bound.cpu_list}"'] if bound.cpus else []),
        f"    mem_limit: {bound.memory_max_bytes // GIB}g",
        *(_GPUS if launch.gpus else []),
        "    healthcheck:",
        f'      test: [CMD, curl, --fail, --silent, --max-time, "5", {_text(launch.health_url)}]',
        "      interval: 30s",
        "      timeout: 10s",
        "      retries: 3",
        f"      start_period: {launch.load_s}s",
        "    restart: unless-stopped",
    ]
    return "\n".join(lines) + "\n"


_GPUS = [
    "    deploy:",
    "      resources:",
    "        reservations:",
    "          devices: [{driver: nvidia, count: all, capabilities: [gpu]}]",
]


def _environment(launch: Launch) -> list[str]:
    if not launch.command.env:
        return []
    return ["    environment:", *(f"      {name}: {_text(value)}" for name, value in launch.command.env.items())]


def _text(value: str) -> str:
    """Quote a YAML scalar as a JSON string; escapes compose variables."""
    return json.dumps(value).replace("$", "$$")
