"""Valid and invalid answers, and scores of the judge."""

import json
from typing import Any

import pytest

from tokenmill.recipes.expansion.answers import CUT, Dropped, compared, example_of, judge_line, verdict_of
from tokenmill.recipes.expansion.lines import ExpansionJob
from tokenmill.recipes.expansion.prompts import JUDGE, load_prompt
from tokenmill.recipes.expansion.seeds import Example, Parent, Shape
from tokenmill.recipes.expansion.transforms import Variant
from tokenmill.recipes.runner import Answered

BEFORE = ({"role": "system", "content": "Be brief."},)
OLD = Example("Add.", "1, 2", "3", BEFORE)
PAIR = Shape("output", "instruction", "input", parts=("instruction", "input", "output"))
TEXT = Shape("text")
HARDER, INSTRUCTION = Variant("harder"), Variant("instruction")
SCHEMA: dict[str, Any] = {"type": "object", "required": ["sum"], "properties": {"sum": {"type": "integer"}}}


def answered(text: str | None, finish: str = "stop") -> Answered:
    return Answered("x", {"choices": [{"message": {"content": text}, "finish_reason": finish}]})


def read(answer: Answered, shape: Shape, variant: Variant = HARDER, schema: dict[str, Any] | None = None) -> Any:
    return example_of(answer, ExpansionJob(Parent("p", "p", 0, OLD), variant, 0), shape, schema)


def parts(**given: Any) -> str:
    return json.dumps({"instruction": "Subtract.", "input": "", "output": "1"} | given)


@pytest.mark.parametrize(
    ("text", "shape", "variant", "schema", "made"),
    [
        (parts(), PAIR, HARDER, None, Example("Subtract.", "", "1", BEFORE)),
        (parts(instruction=" Two. "), PAIR, HARDER, None, Example("Two.", "", "1", BEFORE)),
        (parts(output={"sum": 3}), PAIR, HARDER, SCHEMA, Example("Subtract.", "", '{"sum":3}', BEFORE)),
        (" A text.\n", TEXT, HARDER, None, Example("Add.", "1, 2", "A text.", BEFORE)),
        ("<think>hm\n</think>\nA text.", TEXT, HARDER, None, Example("Add.", "1, 2", "A text.", BEFORE)),
        ('{ "sum": 3 }', TEXT, HARDER, SCHEMA, Example("Add.", "1, 2", '{"sum":3}', BEFORE)),
        ("What is 1 + 2?", PAIR, INSTRUCTION, SCHEMA, Example("What is 1 + 2?", "", "3", BEFORE)),
    ],
)
def test_examples_of_answers(
    text: str, shape: Shape, variant: Variant, schema: dict[str, Any] | None, made: Example
) -> None:
    assert read(answered(text), shape, variant, schema) == made


@pytest.mark.parametrize(
    ("answer", "shape", "schema", "dropped"),
    [
        (Answered("x", None, "too_long", "the prompt is too long"), PAIR, None, ("failed", "the prompt is too long")),
        (Answered("x", None, "engine_error"), PAIR, None, ("failed", "engine_error")),
        (Answered("x", {"choices": []}), PAIR, None, ("failed", "no answer")),
        (answered(None), PAIR, None, ("failed", "no answer")),
        (answered(parts(), "length"), PAIR, None, ("invalid", CUT)),
        (answered(" \n"), TEXT, None, ("invalid", "empty")),
        (answered("<think>only this</think>"), TEXT, None, ("invalid", "empty")),
        (answered("Sure! {}"), PAIR, None, ("invalid", "not JSON")),
        (answered("[" * 100_000), PAIR, None, ("invalid", "nested too deeply")),
        (answered("1"), TEXT, {"$ref": "#"}, ("invalid", "answer is nested too deeply")),
        (answered('{"instruction": "x"}'), PAIR, None, ("invalid", "answer: 'input' is a required property")),
        (answered(parts(output=" ")), PAIR, None, ("invalid", "output is empty")),
        (
            answered(parts(more=1)),
            PAIR,
            None,
            ("invalid", "answer: Additional properties are not allowed ('more' was unexpected)"),
        ),
        (answered(parts()), PAIR, SCHEMA, ("invalid", "answer.output: '1' is not of type 'object'")),
        (answered("{}"), TEXT, SCHEMA, ("invalid", "answer: 'sum' is a required property")),
    ],
)
def test_invalid_answers_are_dropped_with_a_reason(
    answer: Answered, shape: Shape, schema: dict[str, Any] | None, dropped: tuple[str, str]
) -> None:
    found = read(answer, shape, HARDER, schema)
    assert isinstance(found, Dropped)
    assert tuple(found) == dropped


def test_the_compared_text() -> None:
    assert compared(OLD, task_alone=False) == "Add.\n1, 2\n3"
    assert compared(OLD, task_alone=True) == "Add.\n1, 2"
    assert compared(Example(answer="x"), task_alone=True) == ""


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('{"score": 4, "reason": "good"}', (4, "good")),
        ('{"score": 1}', (1, None)),
        ('{"score": 5, "reason": "it is very', (5, None)),  # cut inside the reason
        ('{"score": 5', None),
        ('{"score": 6, "reason": ""}', None),
        ('{"score": true}', None),
        ('{"score": "4"}', None),
        ("[4]", None),
        ("4", None),
        (None, None),
    ],
)
def test_verdicts(text: str | None, verdict: tuple[int, str | None] | None) -> None:
    found = verdict_of(answered(text))
    assert (None if found is None else tuple(found)) == verdict


def test_the_judge_sees_both_examples_and_is_greedy() -> None:
    line = judge_line("harder-1", Example("Hard?"), OLD, Variant("language", "de"), load_prompt(JUDGE), PAIR)
    text = line["body"]["messages"][-1]["content"]
    assert line["custom_id"] == "judge-harder-1"
    assert line["body"]["temperature"] == 0
    assert text.index("What was asked: language German") < text.index("Add.") < text.index("Hard?")
