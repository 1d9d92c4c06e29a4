"""Which machines of a cluster count, and what they are called."""

from typing import Any

import pytest

from tokenmill.engine.ray_cluster.nodes import Node, agreed, living, name_for


def row(node: str, host: str = "mill", *, alive: bool = True, **resources: float) -> dict[str, Any]:
    """As ray.nodes() has it, as far as it matters here."""
    return {
        "NodeID": node,
        "Alive": alive,
        "NodeManagerHostname": host,
        "NodeManagerAddress": "10.0.0.1",
        "Resources": {"memory": 1e10, **resources},
    }


def test_machines_that_live_and_give_processors_are_used() -> None:
    rows = [row("c", "zeta", CPU=4.0), row("b", "alpha", CPU=64.0, GPU=2.0), row("a", alive=False, CPU=4.0), row("d")]
    assert living(rows) == (Node("b", "alpha", 64.0, 2.0), Node("c", "zeta", 4.0, 0.0))


def test_a_machine_without_a_name_is_called_by_its_address() -> None:
    assert living([row("a", "", CPU=1.0)])[0].host == "10.0.0.1"


def test_machines_of_one_name_get_numbers() -> None:
    node, taken = Node("a", "mill", 1.0, 0.0), list[str]()
    for _ in range(3):
        taken.append(name_for(node, taken))
    assert taken == ["mill", "mill-2", "mill-3"]


@pytest.mark.parametrize(
    ("identities", "expected"),
    [([], None), (["x"], "x"), (["x", "y", "y"], "y"), (["y", "x"], "y"), (["x", "y", "y", "x", "x"], "x")],
)
def test_the_model_that_most_have_counts(identities: list[str], expected: str | None) -> None:
    assert agreed(identities) == expected
