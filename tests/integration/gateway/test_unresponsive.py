"""A wedged engine: clients, /health and the dashboard see it within seconds, and it is restarted."""

import os
import signal
import time
from pathlib import Path

import openai
import pytest

from support import patient
from support.gateway import Served, config_in, native_engine, served

STEP_LIMIT_S = 20.0
SOON_S = 15.0  # the engine counts as unresponsive after 5 s; the machine may be busy


def health(gateway: Served) -> tuple[int, str]:
    answer = patient.get(f"{gateway.url}/health")
    return answer.status_code, answer.json()["engines"]["here"]


def test_a_stopped_engine_is_seen_and_restarted(smollm2_path: Path, tmp_path: Path) -> None:
    question = [{"role": "user", "content": "Say hi."}]
    with served(native_engine(smollm2_path, step_limit_s=STEP_LIMIT_S), config_in(tmp_path)) as gateway:
        client = gateway.client()
        before = client.chat.completions.create(model="smollm2", messages=question, max_tokens=8, temperature=0)
        assert health(gateway) == (200, "ready")
        pid = gateway.state.backends[0].engine.identity.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="smollm2", messages=question, max_tokens=8)
        assert (caught.value.status_code, caught.value.code) == (503, "engine_unresponsive")
        assert caught.value.response.headers["retry-after"]
        assert health(gateway) == (503, "unresponsive")
        assert time.monotonic() - began_s < SOON_S
        now = patient.get(f"{gateway.url}/api/status").json()
        assert (now["status"], now["engines"][0]["state"]) == ("down", "unresponsive")
        assert "no heartbeat for" in now["engines"][0]["detail"]
        while health(gateway)[1] != "ready":
            time.sleep(0.2)
        assert gateway.state.backends[0].engine.identity.pid != pid
        after = client.chat.completions.create(model="smollm2", messages=question, max_tokens=8, temperature=0)
        assert after.choices[0].message.content == before.choices[0].message.content
