"""Writes the responses of a running vLLM to tests/data/http: python tests/support/vllm_capture.py URL [LOG].

Each file has one request and its response: JSON as `body`, streams and metrics as `text`. The requests are sent in this
order to a server that has answered nothing yet. With LOG, its start log is copied to tests/data/logs/vllm-cpu.log
without folder names. `make test-vllm` compares the responses with those of a running vLLM.
"""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import httpx

DATA = Path(__file__).parents[1] / "data"
SYSTEM = {"role": "system", "content": "You are a careful clerk. " + "Every line of the ledger counts. " * 60}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def chat(text: str, **more: Any) -> dict[str, Any]:
    """A chat request with the long system message."""
    messages = [SYSTEM, {"role": "user", "content": text}]
    return {"model": "tiny-moe", "messages": messages, "max_tokens": 8, "temperature": 0, "seed": 1, **more}


def completion(prompt: Any, **more: Any) -> dict[str, Any]:
    """A completion request."""
    return {"model": "tiny-moe", "prompt": prompt, "max_tokens": 8, "temperature": 0, "seed": 1, **more}


USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, tuple[str, dict[str, Any] | None]] = {
    "models": ("/v1/models", None),
    "version": ("/version", None),
    "metrics-cold": ("/metrics", None),
    "chat": (CHAT, chat("What is the sum?")),
    "chat-cached": (CHAT, chat("And the difference?")),
    "chat-stream": (CHAT, chat("What is the sum?", **USAGE)),
    "chat-stream-logprobs": (CHAT, chat("Why?", max_tokens=4, logprobs=True, top_logprobs=2, **USAGE)),
    "chat-logprobs": (CHAT, chat("Why?", max_tokens=4, logprobs=True, top_logprobs=2)),
    "chat-schema": (
        CHAT,
        chat(
            "JSON?",
            max_tokens=3,
            response_format={"type": "json_schema", "json_schema": {"name": "ok", "schema": SCHEMA}},
        ),
    ),
    "chat-choice": (CHAT, chat("Which?", structured_outputs={"choice": ["left", "right"]})),
    "chat-grammar": (CHAT, chat("Which?", structured_outputs={"grammar": 'root ::= "yes" | "no"'})),
    "chat-stop": (CHAT, chat("Go on.", stop=["e"], max_tokens=64)),
    "completion": (TEXT, completion("Once upon a time")),
    "completion-tokens": (TEXT, completion([6403, 4018, 253, 655], return_token_ids=True)),
    "completion-stream": (TEXT, completion("Once upon a time", **USAGE)),
    "completion-stream-logprobs": (TEXT, completion("Once upon a time", max_tokens=4, logprobs=2, **USAGE)),
    "too-long-chat": (CHAT, chat("word " * 5000)),
    "too-long-completion": (TEXT, completion("word " * 5000)),
    "answer-cut": (TEXT, completion([655] * 4090, max_tokens=4000)),
    "too-long-stream": (CHAT, chat("word " * 5000, **USAGE)),
    "refused-temperature": (CHAT, chat("Hm.", temperature=-1)),
    "refused-logprobs": (CHAT, chat("Hm.", logprobs=True, top_logprobs=99)),
    "priority-ignored": (CHAT, chat("Hm.", priority=3)),
    "refused-grammar": (CHAT, chat("Hm.", structured_outputs={"grammar": "root ::= ("})),
    "refused-tools": (
        CHAT,
        chat(
            "Hm.",
            tool_choice="auto",
            tools=[
                {"type": "function", "function": {"name": "sum", "parameters": {"type": "object", "properties": {}}}}
            ],
        ),
    ),
    "unknown-model": (CHAT, {**chat("Hm."), "model": "another"}),
    "tokenize-text": ("/tokenize", {"model": "tiny-moe", "prompt": "Once upon a time"}),
    "tokenize-chat": ("/tokenize", {"model": "tiny-moe", "messages": [{"role": "user", "content": "Why?"}]}),
    "metrics": ("/metrics", None),
}


def ask(client: httpx.Client, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """A request and its answer."""
    answer = client.get(path) if body is None else client.post(path, json=body)
    kind = answer.headers.get("content-type", "")
    said = {"body": answer.json()} if kind.startswith("application/json") else {"text": answer.text}
    asked = {"method": "GET" if body is None else "POST", "path": path, **({"body": body} if body is not None else {})}
    return {"request": _short(asked), "status": answer.status_code, "content_type": kind, **said}


def main(url: str, log: str | None = None) -> None:
    """Send all requests in order."""
    with httpx.Client(base_url=url, timeout=300) as client:
        models = client.get("/v1/models").json()
        folder = models["data"][0]["root"]
        source = f"vllm {client.get('/version').json()['version']} on a 2-core CPU, {time.strftime('%Y-%m-%d')}"
        for name, (path, body) in ASKED.items():
            said = json.dumps({"source": source, **ask(client, path, body)}, indent=1, ensure_ascii=False)
            (DATA / "http" / f"vllm-{name}.json").write_text(said.replace(folder, "/models/tiny-moe") + "\n")
    if log is not None:
        (DATA / "logs" / "vllm-cpu.log").write_text(_anonymous(Path(log).read_text(), folder))


def _short(value: Any) -> Any:
    """Shorten long prompts."""
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    if isinstance(value, str) and len(value) > 2100:
        return f"{value[:20]}... ({len(value)} characters)"
    if isinstance(value, list):
        return [_short(inner) for inner in value] if len(value) < 20 else f"{value[:3]}... ({len(value)} tokens)"
    return value


def _anonymous(text: str, folder: str) -> str:
    text = text.replace(folder, "/models/tiny-moe")
    text = re.sub(r"/\S*?/lib/python3\.\d+/site-packages", "/opt/vllm/lib/python3.11/site-packages", text)
    text = re.sub(r"file:///\S*?vllm_dist_\w+", "file:///tmp/vllm_dist_0", text)
    return re.sub(r"mq_connect_ip=[\d.]+", "mq_connect_ip=192.0.2.1", text)


if __name__ == "__main__":
    main(*sys.argv[1:])
