"""Invalid and unreachable addresses, Ray's messages about lost nodes, and the nodes that are used."""

import errno
import os
import re
import sys
from types import ModuleType
from typing import Any

import pytest

from tokenmill.engine.process.ports import free_port
from tokenmill.engine.ray import actors as module
from tokenmill.engine.ray.actors import RayNode, connect, live_nodes
from tokenmill.engine.ray.nodes import most_common, unique_name
from tokenmill.errors import EngineError, UsageError

NODE_DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: NodeActor
\tactor_id: 3d1f0a
\tnamespace: 11fe
\tip: 192.0.2.2
The actor died because its node has died. Node Id: 8d0dfb7ea84a8473
\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"""
NOT_INSTALLED = """The actor died because of an error raised in its creation task, ray::NodeActor.__init__()
  File "python/ray/includes/common.pxi", line 1
ModuleNotFoundError: No module named 'tokenmill'"""
BROKEN = """The actor died because of an error raised in its creation task, ray::NodeActor.__init__()
ValueError: no such plan"""


@pytest.mark.parametrize("where", ["foo", "", "ray:", "ray://foo", "http://foo:1", "foo:bar", "foo:1/x", "a b:1"])
def test_what_is_no_address_is_refused(where: str) -> None:
    with pytest.raises(UsageError) as caught, connect(where):
        pass
    assert repr(where) in caught.value.message
    assert "ray://HOST:10001" in (caught.value.hint or "")


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError) as caught, connect("ray"):
        pass
    assert caught.value.hint == "pip install 'ray>=2.40,<3'"


@pytest.mark.parametrize(("said", "holds"), [(None, "0"), ("1", "1")])
def test_a_cluster_that_is_started_tells_nobody_unless_somebody_wants_it(
    monkeypatch: pytest.MonkeyPatch, said: str | None, holds: str
) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", said or "")
    if said is None:
        monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    found: list[str | None] = []
    ray = ModuleType("ray")
    vars(ray).update(init=lambda **_: found.append(os.environ.get("RAY_USAGE_STATS_ENABLED")), shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with connect("ray"):
        assert found == [holds]


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_where_nothing_listens_ray_is_not_asked(scheme: str) -> None:
    where = f"{scheme}127.0.0.1:{free_port('127.0.0.1', 0)}"
    with pytest.raises(EngineError, match=f"{re.escape(where)}: {os.strerror(errno.ECONNREFUSED)}"):
        module._check_listening(where)


@pytest.mark.parametrize("where", ["ray", "auto", "local"])
def test_what_ray_finds_by_itself_is_left_to_it(where: str) -> None:
    module._check_listening(where)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (NODE_DIED, "The actor died because its node has died."),
        (NOT_INSTALLED, "tokenmill is not installed on this node"),
        (BROKEN, "ValueError: no such plan"),
        (
            "The actor experienced an error before finishing this task.",
            "The actor experienced an error before finishing this task.",
        ),
        ("", "RuntimeError"),
    ],
)
def test_of_rays_page_the_line_that_says_why_is_kept(text: str, words: str) -> None:
    assert module._death_cause(RuntimeError(text)) == words


def row(node: str, host: str = "mill", *, alive: bool = True, **resources: float) -> dict[str, Any]:
    """A row of ray.nodes(), with the fields that are used."""
    return {
        "NodeID": node,
        "Alive": alive,
        "NodeManagerHostname": host,
        "NodeManagerAddress": "10.0.0.1",
        "Resources": {"memory": 1e10, **resources},
    }


def test_machines_that_live_and_give_processors_are_used() -> None:
    rows = [row("c", "zeta", CPU=4.0), row("b", "alpha", CPU=64.0, GPU=2.0), row("a", alive=False, CPU=4.0), row("d")]
    assert live_nodes(rows) == (RayNode("b", "alpha", 64.0, 2.0), RayNode("c", "zeta", 4.0, 0.0))


def test_a_machine_without_a_name_is_called_by_its_address() -> None:
    assert live_nodes([row("a", "", CPU=1.0)])[0].host == "10.0.0.1"


def test_machines_of_one_name_get_numbers() -> None:
    node, taken = RayNode("a", "mill", 1.0, 0.0), list[str]()
    for _ in range(3):
        taken.append(unique_name(node.host, taken))
    assert taken == ["mill", "mill-2", "mill-3"]


@pytest.mark.parametrize(
    ("identities", "expected"),
    [([], None), (["x"], "x"), (["x", "y", "y"], "y"), (["y", "x"], "y"), (["x", "y", "y", "x", "x"], "x")],
)
def test_the_model_that_most_have_counts(identities: list[str], expected: str | None) -> None:
    assert most_common(identities) == expected
