"""Clusters that are not there, and what Ray says of a host that is gone."""

import os
import sys
from types import ModuleType

import pytest

from tokenmill.engine.ports import free_port
from tokenmill.engine.ray_cluster import cluster
from tokenmill.engine.ray_cluster.cluster import connected
from tokenmill.errors import EngineError, UsageError

NODE_DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: Host
\tactor_id: 3d1f0a
\tnamespace: 11fe
\tip: 192.0.2.2
The actor died because its node has died. Node Id: 8d0dfb7ea84a8473
\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"""
NOT_INSTALLED = """The actor died because of an error raised in its creation task, ray::Host.__init__()
  File "python/ray/includes/common.pxi", line 1
ModuleNotFoundError: No module named 'tokenmill'"""
BROKEN = """The actor died because of an error raised in its creation task, ray::Host.__init__()
ValueError: no such plan"""


@pytest.mark.parametrize("where", ["foo", "", "ray:", "ray://foo", "http://foo:1", "foo:bar", "foo:1/x", "a b:1"])
def test_what_is_no_address_is_refused(where: str) -> None:
    with pytest.raises(UsageError, match="is no Ray cluster") as caught, connected(where):
        pass
    assert caught.value.hint == "ray, HOST:6379, or ray://HOST:10001"


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match="Ray is not installed here") as caught, connected("ray"):
        pass
    assert caught.value.hint == "pip install 'tokenmill[ray]'"


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
    with connected("ray"):
        assert found == [holds]


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_where_nothing_listens_ray_is_not_asked(scheme: str) -> None:
    where = f"{scheme}127.0.0.1:{free_port('127.0.0.1', 0)}"
    with pytest.raises(EngineError, match=f"no Ray cluster answers at {where}: Connection refused"):
        cluster._check_there(where)


@pytest.mark.parametrize("where", ["ray", "auto", "local"])
def test_what_ray_finds_by_itself_is_left_to_it(where: str) -> None:
    cluster._check_there(where)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (NODE_DIED, "The actor died because its node has died."),
        (NOT_INSTALLED, "tokenmill is not installed there"),
        (BROKEN, "ValueError: no such plan"),
        (
            "The actor experienced an error before finishing this task.",
            "The actor experienced an error before finishing this task.",
        ),
        ("", "RuntimeError"),
    ],
)
def test_of_rays_page_the_line_that_says_why_is_kept(text: str, words: str) -> None:
    assert cluster._why(RuntimeError(text)) == words
