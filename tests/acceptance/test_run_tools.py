"""Tool calls in `tokenmill run`: forced calls are parsed, and impossible requests become error lines."""

import json
from pathlib import Path
from typing import Any

from support.run_cli import job, ran_here, read, write

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"town": {"$ref": "#/$defs/Town"}},
            "required": ["town"],
            "additionalProperties": False,
            "$defs": {"Town": {"enum": ["Oslo", "Rome"]}},
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "clock"}}


def ask(name: str, **body: Any) -> dict[str, Any]:
    return job(name, "How is the weather in Rome?", **{"tools": [WEATHER, CLOCK], "max_tokens": 60, **body})


def test_tools_in_a_batch_are_enforced_parsed_or_refused(home: Path, store: tuple[str, Path], tmp_path: Path) -> None:
    lines = [
        ask("required", tool_choice="required"),
        ask("only", tool_choice="required", tools=[WEATHER]),
        ask("named", tool_choice=NAMED, parallel_tool_calls=False),
        ask("none", tool_choice="none", max_tokens=4),
        ask("cut", tool_choice="required", tools=[WEATHER], max_tokens=2),
        ask("auto"),  # the model's template does not show tools
        ask("format", tool_choice="required", response_format={"type": "json_object"}),
        ask(
            "shape",
            tool_choice="required",
            tools=[{**CLOCK, "function": {"name": "f", "parameters": {"type": "array"}}}],
        ),
    ]
    source, output = write(tmp_path / "jobs.jsonl", lines), tmp_path / "out.jsonl"
    totals = ran_here(home, source, "--output", output, *store)
    assert (totals["succeeded"], totals["failed"], totals["computed"]) == (5, 3, 5)
    assert totals["least_is_exact"]
    found = {line["custom_id"]: line for line in read(output)}
    choices = {
        name: line["response"]["body"]["choices"][0] for name, line in found.items() if line["response"] is not None
    }

    for name in ("required", "only", "named"):
        choice = choices[name]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["type"] == "function"
        assert call["id"]
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "weather":
            assert arguments["town"] in ("Oslo", "Rome")
        else:
            assert arguments == {}
    assert choices["only"]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert choices["named"]["message"]["tool_calls"][0]["function"]["name"] == "clock"
    for name, reason in (("none", "length"), ("cut", "length")):
        assert choices[name]["finish_reason"] == reason
        assert "tool_calls" not in choices[name]["message"]
    assert not choices["none"]["message"]["content"].startswith("{")

    for name in ("auto", "format", "shape"):
        assert found[name]["error"]["code"] == "refused"
    assert found["auto"]["error"]["message"].startswith("tools: ")
    assert found["format"]["error"]["message"].startswith("tool_choice: ")
    assert found["shape"]["error"]["message"].startswith("tools: ")
