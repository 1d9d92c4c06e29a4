"""A batch runner with scripted answers, for unit tests of recipes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.recipes.runner import Answered, AnswerOrigin, Line, RecipeCost, RecipeEnd

ORIGIN = AnswerOrigin(model="tiny", model_id="sha256:tiny", engine="native", build="b1", context=4096)

Said = str | Mapping[str, Any] | None
"""An answer: its text, a chat completion, or None for a failed line."""


def completion(text: str, line: Line | None = None, *, finish: str = "stop") -> dict[str, Any]:
    """A chat completion with this text; a token is a word."""
    asked = sum(len(str(message["content"]).split()) for message in (line or {}).get("body", {}).get("messages", ()))
    said = len(text.split())
    return {
        "id": "chatcmpl-scripted",
        "object": "chat.completion",
        "created": 0,
        "model": "tiny",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}],
        "usage": {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said},
    }


@dataclass(frozen=True, slots=True)
class ScriptedStage:
    """A finished stage."""

    stage: str
    end: RecipeEnd
    total: int
    given: tuple[Answered, ...]

    def answers(self) -> Iterator[Answered]:
        return iter(self.given)


class ScriptedRunner:
    """Answers lines by a function of the line.

    `stop_after`: number of answers until the budget is used up; every later stage ends with `end` and has the answers so
    far. Answers are kept by line, as in the store: pass `known` of an earlier runner to resume its run. `stages` are
    (name, lines) in order.
    """

    def __init__(
        self,
        answer: Callable[[Line], Said],
        *,
        origin: AnswerOrigin = ORIGIN,
        stop_after: int | None = None,
        end: RecipeEnd = "tokens",
        known: dict[str, Answered] | None = None,
    ) -> None:
        self.origin, self.spent = origin, RecipeCost()
        self.stages: list[tuple[str, tuple[Line, ...]]] = []
        self.known: dict[str, Answered] = {} if known is None else known
        self._answer, self._left, self._end = answer, stop_after, end

    @property
    def lines(self) -> tuple[Line, ...]:
        """Of all stages."""
        return tuple(line for _, lines in self.stages for line in lines)

    async def run(self, stage: str, lines: Iterable[Line]) -> ScriptedStage:
        asked = tuple(lines)
        self.stages.append((stage, asked))
        ids = [line["custom_id"] for line in asked]
        assert len(ids) == len(set(ids)), f"custom_id twice in the stage {stage}"
        given = [found for line in asked if (found := self._one(line)) is not None]
        end: RecipeEnd = "finished" if len(given) == len(asked) else self._end
        return ScriptedStage(stage, end, len(asked), tuple(given))

    def _one(self, line: Line) -> Answered | None:
        """The outcome of a line; None: the budget does not reach so far."""
        key = repr(line["body"])
        if key in self.known:
            self.spent += RecipeCost(reused=1)
            return self.known[key]._replace(custom_id=line["custom_id"])
        if self._left is not None:
            if self._left == 0:
                return None
            self._left -= 1
        said = self._answer(line)
        if said is None:
            self.spent += RecipeCost(failed=1)
            return Answered(line["custom_id"], None, "refused", "scripted to fail")
        body = completion(said, line) if isinstance(said, str) else said
        usage = body.get("usage", {})
        self.spent += RecipeCost(
            answers=1, prompt_tokens=usage.get("prompt_tokens", 0), completion_tokens=usage.get("completion_tokens", 0)
        )
        self.spent = replace(self.spent, seconds=self.spent.seconds + 1.0)
        answered = Answered(line["custom_id"], body)
        self.known[key] = answered
        return answered
