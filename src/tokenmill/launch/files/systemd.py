"""A systemd service: processors and memory policy are the unit's, and it counts as started once it is healthy."""

from tokenmill.launch.binding import Binding
from tokenmill.launch.files.launch import Launch, grouped
from tokenmill.units import GIB


def write(launch: Launch) -> str:
    """The unit."""
    lines = [
        f"# /etc/systemd/system/{launch.name}.service",
        *(f"# {comment}" for comment in launch.comments),
        "[Unit]",
        f"Description={specifiers(launch.title)}",
        "Wants=network-online.target",
        "After=network-online.target",
        "",
        "[Service]",
        "Type=exec",
        *(f"Environment={quoted(f'{name}={value}', variables=False)}" for name, value in launch.command.env.items()),
        "ExecStart=" + continued([[quoted(word) for word in group] for group in grouped(list(launch.command.argv))]),
        "# answers once the model is loaded",
        "ExecStartPost=curl --fail --silent --output /dev/null --retry-connrefused --retry-delay 5 "
        f"--retry {launch.load_s // 5} {launch.health_url}",
        f"TimeoutStartSec={launch.load_s + 60}",
        "Restart=on-failure",
        "RestartSec=10",
        *bound_to(launch.binding),
        *(["LimitMEMLOCK=infinity"] if launch.mlock else []),
        f"MemoryMax={launch.binding.memory_max_bytes // GIB}G",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def bound_to(bound: Binding) -> list[str]:
    """Processors and memory policy as systemd spells them."""
    lines = []
    if bound.cpus:
        lines += [f"AllowedCPUs={bound.cpu_list}", f"CPUAffinity={bound.cpu_list}"]
    if bound.nodes:
        lines += ["NUMAPolicy=bind", f"NUMAMask={bound.node_list}"]
        lines += [] if bound.cpus else ["CPUAffinity=numa"]
    elif bound.interleave:
        lines += ["NUMAPolicy=interleave", "NUMAMask=all"]
    return lines


def continued(groups: list[list[str]]) -> str:
    """Words on several lines, as unit files continue them."""
    return " \\\n    ".join(" ".join(group) for group in groups)


def quoted(word: str, *, variables: bool = True) -> str:
    """A word for a unit file: backslashes, specifiers and (in commands) variables lose their meaning."""
    text = specifiers(word).replace("\\", "\\\\").replace('"', '\\"')
    if variables:
        text = text.replace("$", "$$")
    plain = word and not any(char.isspace() or char in "\"'\\;" for char in word)
    return text if plain else f'"{text}"'


def specifiers(text: str) -> str:
    """Percent signs start specifiers in unit files."""
    return text.replace("%", "%%")
