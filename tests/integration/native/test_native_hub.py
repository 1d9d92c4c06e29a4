"""The IPC thread of the native worker on a real socket, in a separate process because it handles signals."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = """
import pathlib, socket, sys, time
from tokenmill.engine.engine import Counters
from tokenmill.native import protocol
from tokenmill.native.ipc_server import IpcServer

for attempt in range(24):
    path = pathlib.Path(sys.argv[1], f"{attempt}.sock")
    hub = IpcServer(path, lambda: protocol.Heartbeat(None, Counters()), lambda: None)
    began = time.monotonic()
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(path))
    client.settimeout(10)
    assert b"starting" in client.recv(4096)
    while time.monotonic() < began + protocol.HEARTBEAT_S - 0.0001 * attempt:
        pass
    hub.post(None, {"result": 7, "value": None})
    hub.close()
    client.settimeout(0.5)
    try:
        print("arrived" if b'{"result":7' in client.recv(4096) else "other")
    except TimeoutError:
        print("lost")
"""


def test_messages_before_the_close_arrive_even_if_a_heartbeat_is_due(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["arrived"] * 24


FOREIGN = r"""
import json, pathlib, socket, sys
from tokenmill.engine.engine import Capabilities, Counters, Identity
from tokenmill.native import protocol
from tokenmill.native.chat.template import ChatTemplate, SpecialTokens
from tokenmill.native.ipc_server import IpcServer, PreparedPrompt

template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}", SpecialTokens("", ""))
no = Capabilities(*[False] * 13, max_logprobs=0)
hello = protocol.Handshake(Identity("native", "m", "m", "b", 64, 1, "a"), no, (), 0.0, 1, 1)
path = pathlib.Path(sys.argv[1], "w.sock")
hub = IpcServer(path, lambda: protocol.Heartbeat(None, Counters()), lambda: None)
hub.open(hello, lambda request: PreparedPrompt(tuple(template.render(request.prompt).text.encode())))
client = socket.socket(socket.AF_UNIX)
client.connect(str(path))
client.settimeout(10)
lines = client.makefile("rb")
for text in pathlib.Path(sys.argv[2]).read_bytes().splitlines():
    client.sendall(text + b"\n")
    while "error" not in (message := json.loads(next(lines))):
        pass
    print(message["error"], message["kind"])
client.sendall(b'{"submit":9,"request":{"prompt":{"messages":[{"role":"user","content":"hi"}]},"sampling":{}}}\n')
print(bytes(hub.inbox.get(timeout=10).tokens).decode())
hub.close()
"""


def test_malformed_messages_are_refused_and_the_next_request_is_taken(tmp_path: Path) -> None:
    requests: list[Any] = [
        None,
        {},
        {"prompt": 7, "sampling": {}},
        {"prompt": "a", "sampling": {"heat": 1}},
        {"prompt": {"messages": []}, "sampling": {}},
        {"prompt": {"messages": ["hi"]}, "sampling": {}},
        {"prompt": {"messages": [{"role": "user", "content": 7}]}, "sampling": {}},
        {"prompt": {"messages": [{"role": "user", "content": [{}]}]}, "sampling": {}},
    ]
    lines = [json.dumps({"submit": 5, "request": request}) for request in requests]
    lines += ['{"submit": 5}', "[]", "nonsense", "{}", '{"submit": {}}', '{"submit": 5, "request": ' + "[" * 100_000]
    (tmp_path / "lines").write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN, tmp_path, tmp_path / "lines"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stderr == ""
    *refused, answered = done.stdout.splitlines()
    not_messages = ["0 EngineError"] * 3
    assert refused == ["5 RequestRefused"] * 9 + not_messages + ["0 RequestRefused"] * 2
    assert answered == "hi"
