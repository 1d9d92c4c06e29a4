"""The lengths of a job file, estimated from bytes or with a vocabulary."""

import json
from pathlib import Path

import pytest

from tokenmill.jobs.batch_profile import ASSUMED_ANSWER_TOKENS, MAX_TEMPLATE_TOKENS, TEMPLATE_TOKENS, batch_profile

RULES = "Answer with one of the words in the list. " * 40


def jobs_file(folder: Path, *bodies: dict[str, object]) -> Path:
    path = folder / "jobs.jsonl"
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path


def asked(number: int, **more: object) -> dict[str, object]:
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": f"{number:03} " + "word " * 40}]
    return {"messages": messages, **more}


def test_shared_and_own_tokens_are_told_apart(tmp_path: Path) -> None:
    found = batch_profile(jobs_file(tmp_path, *(asked(number, max_tokens=10) for number in range(20))))
    assert found is not None
    assert found.jobs == 20
    assert found.answer_tokens == 10
    assert found.prefix_tokens > 0.8 * len(RULES) / 4
    assert found.own_tokens < TEMPLATE_TOKENS + 0.5 * len(RULES) / 4


@pytest.mark.parametrize("per_byte", [0.2, 0.7])
def test_a_vocabulary_sets_the_rate(tmp_path: Path, per_byte: float) -> None:
    path = jobs_file(tmp_path, *(asked(number, max_tokens=10) for number in range(20)))
    usual = batch_profile(path)
    found = batch_profile(path, count=lambda text: round(per_byte * len(text)))
    assert usual is not None
    assert found is not None
    total = found.prefix_tokens + found.own_tokens - TEMPLATE_TOKENS
    assert total / (usual.prefix_tokens + usual.own_tokens - TEMPLATE_TOKENS) == pytest.approx(per_byte / 0.25, 0.02)


def test_the_longest_prompt_counts_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.jobs.batch_profile.SAMPLE", 4)
    long = {"prompt": "x" * 9000, "max_tokens": 5}
    path = jobs_file(tmp_path, *(asked(number, max_tokens=10) for number in range(8)), long)
    found = batch_profile(path, count=len)
    assert found is not None
    assert 9000 + 10 + MAX_TEMPLATE_TOKENS <= found.longest_tokens < 9800
    assert found.jobs == 9


def test_a_job_without_max_tokens_gets_an_assumed_answer(tmp_path: Path) -> None:
    found = batch_profile(jobs_file(tmp_path, asked(1)))
    assert found is not None
    assert found.answer_tokens == ASSUMED_ANSWER_TOKENS


def test_unreadable_lines_are_left_out(tmp_path: Path) -> None:
    path = jobs_file(tmp_path, asked(1, max_tokens=3))
    path.write_text("nonsense\n" + path.read_text())
    found = batch_profile(path)
    assert found is not None
    assert found.answer_tokens == 3
    path.write_text("nonsense\n")
    assert batch_profile(path) is None
    assert batch_profile(tmp_path / "missing.jsonl") is None
