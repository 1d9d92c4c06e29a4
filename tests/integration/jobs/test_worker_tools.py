"""Tools in a batch on the real native engine with random weights: whatever the model prefers, a forced call parses."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.native_engine import native, run
from support.tiny_models import write_moe
from support.worked import QUICK
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import Submission
from tokenmill.jobs.output import Output
from tokenmill.jobs.scheduler.shape import shape_of
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.loop import WorkTask, work
from tokenmill.jobs.worker.progress import RunReport
from tokenmill.model.synthetic import generate

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLACE = {
    "type": "object",
    "properties": {"town": {"enum": ["Oslo", "Rome"]}, "day": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["town", "day"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "clock"}},
]
HERMES = '<tool_call>{"name": "weather", "arguments": {"town": "Rome", "day": 1}}</tool_call>'
SAYS_HERMES = f"root ::= {json.dumps(HERMES)}"
SAYS_IT_TWICE = f"root ::= {json.dumps(HERMES + HERMES)}"
SEEDS = range(12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(generate, "_TEMPLATE", TEMPLATE)
        return write_moe(tmp_path_factory.mktemp("model"))


def worked(model: Path, folder: Path, lines: list[dict[str, Any]]) -> tuple[RunReport, dict[str, dict[str, Any]]]:
    """The report of a run on an engine of its own, and the output lines by custom_id."""
    asked = {"messages": [{"role": "user", "content": "Rome?"}], "tools": TOOLS, "max_tokens": 300}
    (folder / "jobs.jsonl").write_text("".join(json.dumps(asked | line) + "\n" for line in lines))

    async def once() -> RunReport:
        async with native(model, folder / "state") as engine:
            assert engine.capabilities.shows_tools
            shape = shape_of(engine.capabilities, engine.identity)
            with Output(store, batch) as output:
                return await work(WorkTask(store, [batch], engine, shape, outputs={batch.id: output}, options=QUICK))

    with Store(folder / "store") as store:
        batch = submit(store, folder / "jobs.jsonl", Submission("m", output=str(folder / "out.jsonl"))).batch
        report = run(once)
    found = map(json.loads, (folder / "out.jsonl").read_text().splitlines())
    return report, {line["custom_id"]: line["response"]["body"]["choices"][0] for line in found}


def calls_in(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def test_tools_are_enforced_and_calls_parsed(model: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"custom_id": f"hot {seed}", "tool_choice": "required", "temperature": 3, "seed": seed} for seed in SEEDS
    ]
    lines += [
        {"custom_id": "auto", "grammar": SAYS_HERMES},
        {"custom_id": "parallel", "grammar": SAYS_IT_TWICE},
        {"custom_id": "first alone", "grammar": SAYS_IT_TWICE, "parallel_tool_calls": False},
        {"custom_id": "none", "grammar": SAYS_HERMES, "tool_choice": "none"},
        {"custom_id": "words", "grammar": 'root ::= "No."'},
    ]
    report, choices = worked(model, tmp_path, lines)
    assert (report.counts.done, report.counts.failed) == (len(lines), 0)
    called: set[str] = set()
    for seed in SEEDS:
        ((name, arguments),) = calls_in(choices[f"hot {seed}"])
        called.add(name)
        if name == "weather":
            assert arguments["town"] in ("Oslo", "Rome")
            assert 1 <= arguments["day"] <= 9
        else:
            assert (name, arguments) == ("clock", {})
    assert called == {"weather", "clock"}
    once = ("weather", {"town": "Rome", "day": 1})
    assert calls_in(choices["auto"]) == [once]
    assert calls_in(choices["parallel"]) == [once, once]
    assert calls_in(choices["first alone"]) == [once]
    for name, text in (("none", HERMES), ("words", "No.")):
        assert choices[name]["finish_reason"] == "stop"
        assert choices[name]["message"] == {"role": "assistant", "content": text}
    # the tools of "none" are not in the prompt, and the minimum counts what was sent
    assert report.minimum is not None
    assert report.minimum.exact
    assert report.minimum.tokens <= report.tokens.computed
