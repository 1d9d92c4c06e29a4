"""Every habit that breaks reuse is found, named, shown and priced; a clean file is left in peace."""

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.jobs.lint.report import COSTLY, LintFinding, Report
from tokenmill.jobs.lint.run import Lint
from tokenmill.storage.lines import BadLine

JOBS = 40
WORDS = [
    "order",
    "shape",
    "colour",
    "weight",
    "reason",
    "place",
    "name",
    "cost",
    "speed",
    "depth",
    "width",
    "height",
    "origin",
    "end",
    "river",
    "mountain",
    "engine",
    "table",
    "letter",
    "window",
    "garden",
    "silver",
    "copper",
    "needle",
    "anchor",
    "basket",
    "candle",
    "feather",
    "harbour",
    "island",
    "jungle",
    "kernel",
    "ladder",
]
_DRAWN = random.Random(7)
DIGEST = " ".join(
    " ".join(_DRAWN.choice(WORDS) for _ in range(9)).capitalize() + ("." if number % 5 else ".\n")
    for number in range(60)
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": DIGEST[at : at + 400],
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
    for name, at in (("weather", 0), ("calendar", 500))
]


def document(number: int, words: int = 60) -> str:
    rng = random.Random(number)
    return " ".join(rng.choice(WORDS) for _ in range(words))


def chat(system: str, user: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"max_tokens": 64, **more, "messages": messages}


def looked(lines: Iterator[dict[str, Any]], **options: Any) -> Report:
    look = Lint(**options)
    for number, line in enumerate(lines, 1):
        look.add(number, json.dumps(line, ensure_ascii=False))
    return look.report()


def reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reversed_keys(value[key]) for key in reversed(value)}
    return [reversed_keys(item) for item in value] if isinstance(value, list) else value


def shots(number: int) -> list[dict[str, Any]]:
    examples = [
        {"role": role, "content": f"{role}: {DIGEST[at : at + 300]}"}
        for at in range(0, 1800, 300)
        for role in ("user", "assistant")
    ]
    order = [*range(0, 12, 2)]
    random.Random(number).shuffle(order)
    return [examples[at + turn] for at in order for turn in (0, 1)]


Make = Callable[[int], dict[str, Any]]
BROKEN: dict[str, Make] = {
    "timestamp": lambda n: chat(f"Now it is 2026-01-03 04:{n:02d}:06.\n{DIGEST}", document(n)),
    "id": lambda n: chat(f"Request {random.Random(n).getrandbits(128):032x}.\n{DIGEST}", document(n)),
    "number": lambda n: chat(f"Job {n} of {JOBS}.\n{DIGEST}", document(n)),
    "whitespace": lambda n: chat(DIGEST.replace(".\n", [".\r\n", ".\n", ". \n", ".\n  "][n % 4]), document(n)),
    "key_order": lambda n: chat("Be brief.", document(n), tools=reversed_keys(TOOLS) if n % 2 else TOOLS),
    "tool_order": lambda n: chat("Be brief.", document(n), tools=TOOLS[::-1] if n % 2 else TOOLS),
    "near": lambda n: chat(f"Session {document(n, 2)}. {DIGEST}", document(n)),
    "changing": lambda n: chat(f"You are careful.\nContext: {document(n + 500, 120)}\n{DIGEST}", document(n)),
    "order": lambda n: {"max_tokens": 64, "messages": [*shots(n), {"role": "user", "content": document(n)}]},
}


@pytest.mark.parametrize("kind", BROKEN)
def test_each_habit_is_found_as_what_it_is(kind: str) -> None:
    report = looked(BROKEN[kind](number) for number in range(JOBS))
    costly = [finding for finding in report.findings if finding.kind in COSTLY]
    assert costly[0].kind == kind
    assert not report.clean
    assert costly[0].example is not None
    assert costly[0].example.first.line < costly[0].example.second.line
    assert costly[0].jobs is not None
    assert JOBS * 0.4 <= costly[0].jobs < JOBS
    assert report.repaired_bytes < report.compute_bytes


@pytest.mark.parametrize("kind", ["timestamp", "id", "number"])
def test_what_stands_in_every_head_costs_all_of_them_but_one(kind: str) -> None:
    report = looked(BROKEN[kind](number) for number in range(JOBS))
    (found,) = (finding for finding in report.findings if finding.kind in COSTLY)
    assert found.cost_bytes == pytest.approx((JOBS - 1) * len(DIGEST), rel=0.05)
    documents = sum(len(document(number)) for number in range(JOBS))
    assert report.compute_bytes == pytest.approx(JOBS * len(DIGEST) + documents, rel=0.05)
    assert report.repaired_bytes == pytest.approx(len(DIGEST) + documents, rel=0.12)


def test_examples_show_both_sides_at_the_byte() -> None:
    (found,) = (f for f in looked(BROKEN["timestamp"](n) for n in range(JOBS)).findings if f.kind == "timestamp")
    assert found.example is not None
    first, second = found.example.first, found.example.second
    assert (first.line, first.where, first.byte) == (1, "message 1 (system)", 10)
    assert (first.before, first.behind) == ("Now it is ", "2026-01-03 04:00:06.\\n" + DIGEST[:2] + "…")
    assert (second.line, second.behind) == (2, "2026-01-03 04:01:06.\\n" + DIGEST[:2] + "…")


CLEAN: dict[str, Make] = {
    "one digest": lambda n: chat(DIGEST, f"Document {n} of 2026-01-{n % 28 + 1:02d}: {document(n)}"),
    "digits in a digest": lambda n: chat(f"{DIGEST} {' 7 rules, 3 ways,' * 200}", f"Question {n}: {document(n)}"),
    "four digests": lambda n: chat(f"{document(n % 4, 300)} {DIGEST[:50]}", document(n)),
    "a date behind all that is shared": lambda n: chat(f"{DIGEST}\nNow it is 04:{n:02d}.", document(n)),
    "no head at all": lambda n: {"prompt": document(n), "max_tokens": 5},
    "tools": lambda n: chat(DIGEST, document(n), tools=TOOLS),
    "tokens": lambda n: {"prompt": [*range(200), n], "max_tokens": 5},
    "a growing conversation": lambda n: {
        "max_tokens": 5,
        "messages": [
            {"role": ("user", "assistant")[turn % 2], "content": document(turn)} for turn in range(2 * (n % 5) + 1)
        ],
    },
}


@pytest.mark.parametrize("kind", CLEAN)
def test_good_files_are_clean(kind: str) -> None:
    report = looked(CLEAN[kind](number) for number in range(JOBS))
    assert [finding for finding in report.findings if finding.kind in COSTLY] == []
    assert report.clean


def test_two_causes_are_both_priced_as_if_the_other_were_repaired() -> None:
    report = looked(chat(f"At 04:{n:02d}. Request {n * 7919:08x}a1. {DIGEST}", document(n)) for n in range(JOBS))
    costs = {finding.kind: finding.cost_bytes for finding in report.findings if finding.kind in COSTLY}
    assert set(costs) == {"timestamp", "id"}
    assert all(cost == pytest.approx((JOBS - 1) * len(DIGEST), rel=0.05) for cost in costs.values())


def test_a_lone_message_has_a_head_too() -> None:
    report = looked(
        {
            "max_tokens": 5,
            "messages": [{"role": "user", "content": f"2026-01-{n % 28 + 1:02d}\n{DIGEST}\n{document(n)}"}],
        }
        for n in range(28)
    )
    assert report.findings[0].kind == "timestamp"
    assert report.findings[0].cost_bytes == pytest.approx(27 * len(DIGEST), rel=0.05)


def test_a_heads_sample_scales_to_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.jobs.lint.prefixes.MAX_TEXT", 100_000)  # some 25 heads of 400
    report = looked(BROKEN["near"](number) for number in range(400))
    (found,) = (finding for finding in report.findings if finding.kind == "near")
    assert found.cost_bytes == pytest.approx(399 * len(DIGEST), rel=0.35)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda n: chat(f"{DIGEST}\nContext: {document(n + 500, 120)}", document(n, 8)), True),
        (lambda n: chat(f"{DIGEST}\nContext: {document(n % 4 + 500, 120)}", document(n, 8)), False),  # a digest each
        (lambda n: chat(f"{DIGEST}\nToday is the {n}th.", document(n, 8)), False),
        (lambda n: chat(document(n, 200), document(n, 8)), False),  # nothing in common at all
        (lambda n: chat(DIGEST, document(n, 120)), False),
    ],
    ids=["retrieved", "four digests", "a date", "documents", "in the last message"],
)
def test_retrieved_text_at_the_end_of_a_system_message_is_noted(make: Make, said: bool) -> None:
    report = looked(make(number) for number in range(JOBS))
    found = [finding for finding in report.findings if finding.kind == "context"]
    assert bool(found) == said
    assert report.clean  # it costs nothing as long as nothing that others have stands behind it
    if said:
        assert found[0].jobs == JOBS
        assert "lines 1 and 2" in (found[0].detail or "")


ENDS: list[tuple[Callable[[int], str], bool]] = [
    (lambda n: f"{DIGEST}\nRequest: {UUID(int=random.Random(n).getrandbits(128))}", True),
    (lambda n: f"{DIGEST}\nRequest: req_{n:02}f3a{n:02}", True),
    (lambda n: f"{DIGEST}\nNow: 2026-11-15 06:{n:02}:00", True),
    (lambda n: DIGEST + ("\nRequest: req_8f3a77" if n == 7 else "\nRequest: req_8f3a78"), False),  # one is no habit
    (lambda n: f"{DIGEST}\nThere are {n} of them.", False),
    (lambda n: f"{DIGEST}\nRequest: {UUID(int=7)}", False),
]


@pytest.mark.parametrize(("system", "said"), ENDS, ids=["uuid", "id", "time", "one", "number", "the same"])
def test_an_id_at_the_end_of_a_system_message_is_noted(system: Callable[[int], str], said: bool) -> None:
    """Next to nothing is lost there, so it is said and no fault."""
    report = looked(chat(system(number), f"What of thing {number}?") for number in range(JOBS))
    found = [finding for finding in report.findings if finding.kind == "own_end"]
    assert bool(found) == said
    assert report.clean
    assert not any(finding.kind in COSTLY for finding in report.findings)
    if said:
        assert (found[0].jobs, found[0].cost_bytes) == (JOBS - 1, None)
        assert "line 2" in (found[0].detail or "")


def test_an_id_that_costs_something_is_not_told_twice() -> None:
    report = looked(chat(f"Request: req_{number:02}f3a{number:02}\n{DIGEST}", "What?") for number in range(JOBS))
    assert {"id"} <= {finding.kind for finding in report.findings}
    assert "own_end" not in {finding.kind for finding in report.findings}


def of_kind(report: Report, kind: str) -> LintFinding:
    (found,) = (finding for finding in report.findings if finding.kind == kind)
    return found


def test_lines_that_cannot_be_run() -> None:
    look = Lint()
    for number, text in enumerate(
        ['{"prompt": 1}', "{", '{"prompt": "a", "max_tokens": 1}', '{"prompt": "\\ud800"}'], 1
    ):
        look.add(number, text)
    look.bad(BadLine(9, "too long"))
    report = look.report()
    assert report.jobs == 1
    assert of_kind(report, "bad_line").jobs == 4
    assert "line 1: prompt: " in (of_kind(report, "bad_line").detail or "")
    assert not report.clean


def test_prompts_that_do_not_fit() -> None:
    report = looked(({"prompt": "x" * 4 * n, "max_tokens": 50} for n in range(1, 101)), context=100)
    found = of_kind(report, "too_long")
    assert found.jobs == 50
    assert re.findall(r"\d+", found.detail or "") == ["100", "100", "50", "100"]  # line, prompt, answer, context
    assert not report.clean


def test_tokens_are_counted_when_there_is_a_way() -> None:
    report = looked((chat(DIGEST, document(n)) for n in range(3)), count=lambda text: len(text.split()))
    assert report.counted
    assert 5 < report.bytes_per_token < 9


def test_what_is_only_worth_a_note() -> None:
    lines = [chat(document(n % 2, 200), document(5 + n // 4)) for n in range(JOBS)]
    del lines[0]["max_tokens"]
    report = looked(iter(lines))
    assert of_kind(report, "max_tokens").jobs == 1
    assert of_kind(report, "duplicates").jobs == JOBS - 21
    assert "tokens more" in (of_kind(report, "file_order").detail or "")
    assert report.clean


def test_a_digest_of_more_than_16_k_tokens() -> None:
    found = of_kind(looked(chat(DIGEST * 20, document(n)) for n in range(3)), "long_digest")
    assert found.jobs == 3
    assert "line 1" in (found.detail or "")


def test_tools_behind_a_changing_system_message() -> None:
    report = looked(chat(f"{document(n, 50)}", document(n + 99), tools=TOOLS) for n in range(JOBS))
    assert of_kind(report, "tools_behind").cost_bytes == pytest.approx((JOBS - 1) * len(json.dumps(TOOLS)), rel=0.1)
    assert report.clean


def test_a_custom_id_twice() -> None:
    report = looked({"custom_id": f"c{n % 3}", **chat(DIGEST, document(n))} for n in range(4))
    assert of_kind(report, "custom_id").detail == 'line 4 repeats "c0"'
    assert not report.clean


CONTENT = st.text(max_size=40) | st.sampled_from(
    [DIGEST, DIGEST.replace(" ", "  "), "2026-01-03 " + DIGEST, "\r\n\r\n", " "]
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": CONTENT}),
    min_size=1,
    max_size=4,
)


@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # hypothesis, of examples that are wide
@given(st.lists(st.tuples(MESSAGES, st.sampled_from([None, TOOLS, TOOLS[::-1], reversed_keys(TOOLS)])), max_size=8))
def test_no_text_is_too_odd_and_sums_hold(jobs: list[tuple[list[dict[str, str]], list[dict[str, Any]] | None]]) -> None:
    report = looked({"messages": messages, "tools": tools} for messages, tools in jobs)
    assert 0 <= report.repaired_bytes <= report.compute_bytes <= report.prompt_bytes
    assert report.jobs == len(jobs)
    assert all(finding.cost_bytes is None or finding.cost_bytes >= 0 for finding in report.findings)


def test_an_empty_file() -> None:
    report = Lint().report()
    assert [finding.kind for finding in report.findings] == ["empty"]
