"""The summary of `tokenmill expand`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenmill.cli import run
from tokenmill.cli.recipes import expand as command
from tokenmill.cli.views.recipe import RecipeResult
from tokenmill.recipes.expansion.request import Expanded, LineTally
from tokenmill.recipes.runner import AnswerOrigin, RecipeCost, RecipeEnd

ORIGIN = AnswerOrigin("smollm2", "id", "native", "build 7", 1024)
LIMIT = "the limit of tokens for this run is reached; the same command goes on from here"


@pytest.mark.parametrize(
    ("end", "why", "more", "words"),
    [
        (
            "finished",
            "the target is reached",
            {"surplus": 1},
            "5 in out.jsonl, 2 of them seeds; 1 more beyond the target",
        ),
        ("finished", "the target is reached", {"surplus": 2}, "2 more beyond the target"),
        ("tokens", LIMIT, {}, "5 in out.jsonl, 2 of them seeds"),
        (
            "tokens",
            LIMIT,
            {"rows": 9, "replaced": False},
            "kept the previous 9 rows in out.jsonl; this run has 5 so far",
        ),
        ("stopped", "it was stopped", {"rows": 1, "replaced": False}, "kept the previous 1 row in out.jsonl"),
    ],
)
def test_rows_and_the_end_are_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    end: RecipeEnd,
    why: str,
    more: dict[str, Any],
    words: str,
) -> None:
    made = replace(Expanded(Path("out.jsonl"), 5, 3, {"harder": LineTally(4, 3)}, 1, end, why), **more)

    def milled(*_: object, **__: object) -> RecipeResult[Expanded]:
        return RecipeResult(made, end, RecipeCost(answers=4), ORIGIN, None, 1.0, 0)

    (tmp_path / "seeds.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "run_recipe_command", milled)
    assert run(["expand", "seeds.jsonl", "-o", "out.jsonl", "--keep-seeds"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert words in said
    assert f"ended {why}" in said
