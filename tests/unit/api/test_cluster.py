"""Options that contradict a cluster are refused before connecting; events of its nodes are logged."""

import logging
from dataclasses import replace

import pytest

from tokenmill.api.engines.cluster import NodeLog, open_cluster
from tokenmill.api.options import EngineOptions
from tokenmill.config import Config
from tokenmill.engine.loading.progress import LoadProgress
from tokenmill.engine.ray.nodes import NodeEvent
from tokenmill.errors import UsageError
from tokenmill.jobs.store.address import address_of

OPTIONS = EngineOptions()


@pytest.mark.parametrize(
    ("store", "options", "named"),
    [
        ("postgresql://mill@there/jobs", OPTIONS, "PostgreSQL"),
        ("here", replace(OPTIONS, machine="epyc-9175f"), "machine"),
        ("here", replace(OPTIONS, engine="http://127.0.0.1:8080"), "http://127.0.0.1:8080"),
        ("here", replace(OPTIONS, engine="mine"), "'mine'"),
        ("here", replace(OPTIONS, threads=0), "threads .*0"),
    ],
)
def test_contradicting_options_are_refused(store: str, options: EngineOptions, named: str) -> None:
    with pytest.raises(UsageError, match=named), open_cluster("ray", address_of(store), None, options, Config()):
        pass


def test_events_of_nodes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tokenmill")
    node_log = NodeLog()
    node_log.add(NodeEvent("alpha", "found", "16 processors, 1 GPU"))
    for loaded in (10, 20, 30):
        node_log.add(
            NodeEvent("alpha", "loading", loading=LoadProgress("reading", bytes_loaded=loaded, bytes_total=100))
        )
    node_log.add(NodeEvent("alpha", "ready", "llama.cpp; 8 slots"))
    node_log.add(NodeEvent("beta", "excluded", "kimi is not here", "tokenmill models pull kimi"))
    node_log.add(NodeEvent("alpha", "lost", "its node has died"))
    assert "\n".join(caplog.messages).splitlines() == [
        "alpha was found: 16 processors, 1 GPU",
        "alpha: reading 10 B of 100 B",
        "alpha is ready: llama.cpp; 8 slots",
        "beta is excluded: kimi is not here",
        "hint: tokenmill models pull kimi",
        "alpha was lost: its node has died",
    ]
    assert node_log.left_out == {"beta": "kimi is not here"}
