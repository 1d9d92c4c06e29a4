"""The llama-server of the xllamacpp wheel, in a separate process that ends with the test."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx


class EmbeddedServer:
    """A running server."""

    def __init__(self, address: str) -> None:
        self._client = httpx.Client(base_url=address, timeout=200, trust_env=False)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Send and receive JSON."""
        answer = self._client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


@contextmanager
def embedded_server(model: Path, **params: Any) -> Iterator[EmbeddedServer]:
    """Start the server with a model and these fields of CommonParams."""
    with subprocess.Popen(
        [sys.executable, __file__, json.dumps({"model": str(model), **params})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout is not None
            address = child.stdout.readline().strip()
            if not address:
                assert child.stderr is not None
                raise AssertionError(child.stderr.read()[-4000:])
            server = EmbeddedServer(address)
            yield server
            server.close()
        finally:
            child.kill()


def _serve() -> None:
    import os

    from xllamacpp import CommonParams, Server

    address = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(2, 1)
    wanted = json.loads(sys.argv[1])
    params = CommonParams()
    params.model.path = wanted.pop("model")
    params.hostnames, params.port = ["127.0.0.1"], 0
    threads = wanted.pop("threads", 2)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    for name, value in wanted.items():
        setattr(params, name, value)
    server = Server(params)
    print(server.listening_address, file=address, flush=True)
    os.dup2(quiet, 2)  # an unread pipe would fill up
    os.dup2(quiet, 1)
    sys.stdin.read()  # until the test closes the pipe
    os._exit(0)


if __name__ == "__main__":
    _serve()
