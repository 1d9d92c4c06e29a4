"""The machines of a cluster, as its list of them says."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Node:
    """A machine that lives, with what it gives to work on the cluster."""

    id: str
    host: str  # its name, which others may share
    cpus: float
    gpus: float


def living(rows: Iterable[Mapping[str, Any]]) -> tuple[Node, ...]:
    """The machines that live and have processors to give, by name. One that was joined with none is there for others.

    `rows` are Ray's: https://docs.ray.io/en/latest/ray-core/api/doc/ray.nodes.html
    """
    found = [
        Node(
            str(row["NodeID"]),
            str(row.get("NodeManagerHostname") or row.get("NodeManagerAddress") or row["NodeID"]),
            float(row.get("Resources", {}).get("CPU", 0.0)),
            float(row.get("Resources", {}).get("GPU", 0.0)),
        )
        for row in rows
        if row.get("Alive")
    ]
    return tuple(sorted((node for node in found if node.cpus > 0), key=lambda node: (node.host, node.id)))


def name_for(node: Node, taken: Collection[str]) -> str:
    """What a machine is called here: its own name, with a number where another has that."""
    number = 1
    name = node.host
    while name in taken:
        number += 1
        name = f"{node.host}-{number}"
    return name


def agreed(identities: Iterable[str]) -> str | None:
    """The model that most machines have; of several that as many have, the first; None: none has any."""
    counts: dict[str, int] = {}
    for identity in identities:
        counts[identity] = counts.get(identity, 0) + 1
    return max(counts, key=lambda each: counts[each], default=None)
