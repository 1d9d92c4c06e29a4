"""Captured responses of real servers in tests/data/http, each with its request."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.engine.server.response import DONE, data_of

FOLDER = Path(__file__).parents[1] / "data/http"


@dataclass(frozen=True, slots=True)
class Captured:
    """One request and its answer."""

    asked: dict[str, Any]
    status: int
    text: str

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events of a stream."""
        found = [data_of(line) for line in self.text.splitlines()]
        return [json.loads(data) for data in found if data and data != DONE]

    @property
    def body(self) -> Any:
        """The answer's JSON."""
        return json.loads(self.text)


def captured(name: str) -> Captured:
    """`vllm-chat-stream` and the like."""
    said = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    text = said["text"] if "text" in said else json.dumps(said["body"])
    return Captured(said["request"].get("body", {}), said["status"], text)
