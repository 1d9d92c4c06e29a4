"""What the prompts of a run cost at least, for holding it against what was computed."""

from collections.abc import Iterable

from tokenmill.engine import tool_calls
from tokenmill.engine.engine import Engine, Usage
from tokenmill.errors import EngineError, RequestRefused
from tokenmill.jobs.forest import Minimum
from tokenmill.jobs.openai.call import Call

MOST_JOBS = 1000  # whose prompts are made tokens of once more, when the work is done
MOST_TOKENS = 500_000


class Reckoned:
    """The least from bytes, job by job: heads are compared exactly, their tokens taken as their share of the prompt."""

    def __init__(self) -> None:
        self.least, self._bytes = 0.0, Minimum()  # tokens so far

    def add(self, prompt: bytes, usage: Usage) -> None:
        """Count a prompt; mutates."""
        shared = self._bytes.add(prompt)
        self.least += usage.prompt_tokens * (1 - shared / len(prompt)) if prompt else usage.prompt_tokens


async def counted(engine: Engine, calls: Iterable[Call]) -> int | None:
    """The least in tokens, exactly; None where the engine cannot tell a prompt's tokens."""
    total = Minimum()
    try:
        for call in calls:
            sent = tool_calls.adapt(call.request(), engine.capabilities).request
            total.add(await engine.tokenize(sent.prompt))
    except (RequestRefused, EngineError):
        return None
    return total.least
