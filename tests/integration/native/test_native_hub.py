"""The thread that talks for the native worker, at a real socket; in a process of its own, whose signals it takes."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import pathlib, socket, sys, time
from tokenmill.engine.engine import Counters
from tokenmill.engine.native import wire
from tokenmill.engine.native.hub import Hub

for attempt in range(24):
    path = pathlib.Path(sys.argv[1], f"{attempt}.sock")
    hub = Hub(path, lambda: wire.Beat(None, Counters()), lambda: None)
    began = time.monotonic()
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(path))
    client.settimeout(10)
    assert b"starting" in client.recv(4096)
    while time.monotonic() < began + wire.BEAT_S - 0.0001 * attempt:
        pass
    hub.tell(None, {"result": 7, "value": None})
    hub.close()
    client.settimeout(0.5)
    try:
        print("arrived" if b'{"result":7' in client.recv(4096) else "other")
    except TimeoutError:
        print("lost")
"""


def test_what_was_said_before_it_closed_arrives_even_if_a_beat_is_due(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["arrived"] * 24
