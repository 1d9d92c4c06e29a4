"""Prompts of the llama-server in the xllamacpp wheel, for many templates in one short-lived process.

The server takes one template when it starts; with a model of a few kilobytes this takes milliseconds, so one child
process starts one server after another and requests `/apply-template` from each.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Written = dict[str, str | None]  # by conversation; None: refused


def llama_prompts(model: Path, templates: Mapping[str, str], bodies: Mapping[str, Any]) -> dict[str, Written]:
    """What each template makes of each request body; an empty template is the model's own."""
    asked = json.dumps({"model": str(model), "templates": dict(templates), "bodies": dict(bodies)})
    command = [sys.executable, __file__]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Written] = json.loads(done.stdout)
    return found


def _main() -> None:
    import os

    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the server's own words
    asked = json.load(sys.stdin)
    json.dump({name: _written(asked, source) for name, source in asked["templates"].items()}, answer)
    answer.flush()


def _written(asked: dict[str, Any], source: str) -> Written:
    import httpx
    from xllamacpp import CommonParams, Server

    params = CommonParams()
    params.model.path = asked["model"]
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_parallel = 256, 64, 64, 1
    params.warmup, params.fit_params, params.use_jinja = False, False, True
    params.cpuparams.n_threads = 1
    params.chat_template = source
    params.port = 0
    server = Server(params)
    written: Written = {}
    with httpx.Client(base_url=server.listening_address, timeout=200, trust_env=False) as client:
        for name, body in asked["bodies"].items():
            answer = client.post("/apply-template", json=body)
            assert answer.status_code in {200, 400, 500}, answer.text
            written[name] = answer.json()["prompt"] if answer.status_code == 200 else None
    return written


if __name__ == "__main__":
    _main()
