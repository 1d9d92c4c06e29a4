"""Captures answers of the embedded llama-server: python tests/integration/servers/capture.py MODEL.gguf

Writes one file per request and answer to tests/data/http, in the format of those captured from vLLM.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tokenmill.engine.process.ports import free_port
from tokenmill.engine.server.embedded import version

DATA = Path(__file__).parents[2] / "data/http"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Say hi"}]
STREAM = {"stream": True, "stream_options": {"include_usage": True}, "timings_per_token": True, "temperature": 0}
ASKED: dict[str, tuple[str, dict[str, Any] | None]] = {
    "models": ("/v1/models", None),
    "props": ("/props", None),
    "chat-stream": (CHAT, {"messages": MESSAGES, "max_tokens": 4, **STREAM}),
    "chat-stream-cached": (CHAT, {"messages": MESSAGES, "max_tokens": 1, **STREAM}),
    "chat-stream-logprobs": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 2, "logprobs": True, "top_logprobs": 2, **STREAM},
    ),
    "completion-stream-logprobs": (TEXT, {"prompt": "Once upon", "max_tokens": 2, "n_probs": 1, **STREAM}),
    "too-long": (TEXT, {"prompt": "word " * 600, **STREAM}),
    "refused-grammar": (CHAT, {"messages": MESSAGES, "grammar": 'root ::= "a', **STREAM}),
    "refused-messages": (CHAT, {"messages": [{"role": "user"}], **STREAM}),
    "slots": ("/slots", None),
    "metrics": ("/metrics", None),
}


def ask(client: httpx.Client, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    answer = client.get(path) if body is None else client.post(path, json=body)
    kind = answer.headers.get("content-type", "")
    said = {"body": answer.json()} if kind.startswith("application/json") else {"text": answer.text}
    shown = {**body, "prompt": f"{body['prompt'][:10]}..."} if body and len(body.get("prompt", "")) > 100 else body
    asked = {"method": "GET" if body is None else "POST", "path": path, **({"body": shown} if shown else {})}
    return {"request": asked, "status": answer.status_code, "content_type": kind, **said}


def main(model: str) -> None:
    port = free_port("127.0.0.1", 0)
    words = f"--model {model} --alias SmolLM2 --port {port} --ctx-size 1024 --parallel 2 --threads 1 --threads-batch 1"
    more = "--cache-ram 0 --fit off --jinja --metrics"
    argv = [sys.executable, "-m", "tokenmill.engine.server.embedded", *words.split(), *more.split()]
    with subprocess.Popen(argv) as server, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        while True:
            try:
                if client.get("/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        for name, (path, body) in ASKED.items():
            source = f"{version()} on SmolLM2-135M-Instruct Q4_1, {time.strftime('%Y-%m-%d')}"
            said = json.dumps({"source": source, **ask(client, path, body)}, indent=1, ensure_ascii=False)
            (DATA / f"llama-{name}.json").write_text(said.replace(model, "/models/SmolLM2.gguf") + "\n")
        server.terminate()


if __name__ == "__main__":
    main(sys.argv[1])
