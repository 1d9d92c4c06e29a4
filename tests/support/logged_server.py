"""The llama-server of the xllamacpp wheel, started by a plan, with its log in a file."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenmill.planner.plan import Plan

BUFFERS = 4  # the verbosity at which llama.cpp logs its buffers


class LoggedServer:
    """A starting server."""

    def __init__(self, child: "subprocess.Popen[str]", log: Path) -> None:
        self.pid, self.log = child.pid, log
        self.ended = threading.Event()  # set when it is listening or has failed
        self.address = ""
        self._child = child
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        self.address = self._child.stdout.readline().strip()
        self.ended.set()

    def close(self) -> None:
        """Stop the server and wait for it."""
        self._child.kill()
        self._reader.join(120)


@contextmanager
def logged_server(plan: Plan, model: Path, log: Path, **params: Any) -> Iterator[LoggedServer]:
    """Start the server; it may still be loading when yielded."""
    wanted = _params(plan) | {"verbosity": BUFFERS} | params
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [sys.executable, __file__, str(model), json.dumps(wanted)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=out,
            text=True,
        ) as child,
    ):
        server = LoggedServer(child, log)
        try:
            yield server
        finally:
            server.close()


def _params(plan: Plan) -> dict[str, Any]:
    settings = plan.settings
    return {
        "n_ctx": settings.cells,
        "n_parallel": settings.sequences,
        "n_batch": settings.batch,
        "n_ubatch": settings.ubatch,
        "kv_unified": settings.unified,
        "no_extra_bufts": not settings.repack,
        "cache_ram_mib": settings.cache_ram_bytes >> 20,
        "mmap": settings.mmap,
        "threads": settings.threads,
        "fit_params": False,
    }


def _serve() -> None:
    import os

    import xllamacpp

    address = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    wanted = json.loads(sys.argv[2])
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.hostnames, params.port = ["127.0.0.1"], 0
    modes = xllamacpp.llama_load_mode
    params.load_mode = modes.LLAMA_LOAD_MODE_MMAP if wanted.pop("mmap") else modes.LLAMA_LOAD_MODE_NONE
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = wanted.pop("threads")
    for name, value in wanted.items():
        setattr(params, name, value)
    server = xllamacpp.Server(params)
    print(server.listening_address, file=address, flush=True)
    sys.stdin.read()  # until the test closes the pipe
    os._exit(0)


if __name__ == "__main__":
    _serve()
