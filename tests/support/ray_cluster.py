"""A Ray cluster of several nodes on this machine, in a separate process.

    ray_cluster.py NODES

Prints its address and the names of its nodes as one JSON object per line; kills the node whose identity it reads from
stdin, and ends when stdin is closed. A killed node gets no chance to shut down, as after a power failure.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LIMIT_S = 200.0
STORE_BYTES = 80 << 20


def main() -> None:
    from ray.cluster_utils import Cluster

    from tokenmill.engine.process.identity import descendants
    from tokenmill.engine.process.ports import free_port

    count, port = int(sys.argv[1]), free_port("127.0.0.1", 0)
    settings: dict[str, Any] = {
        "num_cpus": 1,
        "num_gpus": 0,
        "object_store_memory": STORE_BYTES,
        "include_dashboard": False,
        "wait": False,
    }
    # Ray declares a node that refuses connections dead after five seconds, an unresponsive one much later.
    quick = {"health_check_period_ms": 1000, "health_check_timeout_ms": 20000, "health_check_failure_threshold": 5}
    head = {**settings, "num_cpus": 0, "ray_client_server_port": port, "_system_config": quick}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(**settings) for _ in range(count)]
    cluster.wait_for_nodes(timeout=LIMIT_S)
    host = cluster.address.rpartition(":")[0]
    _say(address=cluster.address, client=f"ray://{host}:{port}", nodes=[node.node_id for node in nodes])
    for line in sys.stdin:
        raylet = next(_raylet(node) for node in nodes if node.node_id == line.strip())
        for pid in (raylet, *descendants(raylet)):  # actors would keep answering for a while
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _say(killed=line.strip())
    cluster.shutdown()  # type: ignore[no-untyped-call]


def _raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def _say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


class RayCluster:
    """The cluster process, as used by tests."""

    def __init__(self, process: "subprocess.Popen[str]", said: dict[str, Any]) -> None:
        self._process = process
        self.address: str = said["address"]
        self.client: str = said["client"]  # address of Ray Client
        self.nodes: list[str] = said["nodes"]  # their ids

    def kill(self, node: str) -> None:
        """Kill a node as in a power failure."""
        assert self._process.stdin is not None
        self._process.stdin.write(node + "\n")
        self._process.stdin.flush()
        assert _heard(self._process) == {"killed": node}


def _heard(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """The next JSON line; skips output of Ray."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise AssertionError("the cluster ended")


@contextmanager
def ray_cluster(nodes: int, folder: Path, home: Path) -> Iterator[RayCluster]:
    """A cluster with a Ray head node without engines and a number of nodes; `home`: the state folder of their engines."""
    env = os.environ | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "GRPC_ENABLE_FORK_SUPPORT": "0",
        "RAY_TMPDIR": str(folder),
        "XDG_STATE_HOME": str(home),
    }
    log = (folder / "cluster.log").open("w")
    process = subprocess.Popen(
        [sys.executable, __file__, str(nodes)],
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
    )
    try:
        yield RayCluster(process, _heard(process))
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(LIMIT_S)
        assert process.stdout is not None
        process.stdout.close()
        log.close()


if __name__ == "__main__":
    main()
