"""A podman quadlet: a .container file that systemd turns into a service."""

from tokenmill.launch.files.launch import SHARED_MEMORY, Launch
from tokenmill.launch.files.podman import health_command
from tokenmill.launch.files.systemd import continued, quoted, specifiers
from tokenmill.units import GIB


def write(launch: Launch) -> str:
    """The .container file."""
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
