"""The summary of a recipe: its rows are consistent with each other."""

import pytest

from tokenmill.cli.views.recipe import RecipeResult, summary_rows
from tokenmill.recipes.runner import AnswerOrigin, RecipeCost


@pytest.mark.parametrize(
    ("spent", "answers"),
    [
        (RecipeCost(), "none"),
        (RecipeCost(reused=32), "32 from earlier runs, nothing to compute"),
        (RecipeCost(answers=3, prompt_tokens=9, completion_tokens=9), "3 computed"),
        (RecipeCost(answers=3, reused=2, prompt_tokens=9, completion_tokens=9), "3 computed, 2 from earlier runs"),
        (RecipeCost(reused=32, prompt_tokens=325), "none finished, 32 from earlier runs"),  # a limit was reached
        (RecipeCost(prompt_tokens=325), "none finished"),
    ],
)
def test_answers_agree_with_what_was_computed(spent: RecipeCost, answers: str) -> None:
    rows = summary_rows(RecipeResult(None, "tokens", spent, AnswerOrigin("tiny", "m", "native", "b2"), None, 1.0, 0))
    assert rows["answers"] == answers
    assert ("prompts" in rows) == bool(spent.tokens)
