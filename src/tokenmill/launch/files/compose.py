"""A docker compose file, published on loopback only."""

import json

from tokenmill.launch.files.launch import SHARED_MEMORY, Launch
from tokenmill.units import GIB


def write(launch: Launch) -> str:
    """The compose file."""
    bound = launch.binding
    mount = launch.mount
    source = f"${{HOME}}/{mount.source[2:]}" if mount.source.startswith("~/") else _text(mount.source)[1:-1]
    volume = f"{source}:{mount.inside}" + ("" if mount.source.startswith("~/") else ":ro,Z")
    lines = [
        f"# {launch.title}",
        *(f"# {comment}" for comment in launch.comments),
        *([f"# {mount.note}"] if mount.note else []),
        *(["# compose cannot spread memory over NUMA nodes; podman and systemd can"] if bound.interleave else []),
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
    """A double-quoted scalar, which JSON strings are in YAML; compose's own variables lose their meaning."""
    return json.dumps(value).replace("$", "$$")
