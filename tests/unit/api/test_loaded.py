"""Requests in flight and the names of loaded engines; the engine itself is in tests/integration/api."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

import tokenmill
from tokenmill.api.background import Background, BackgroundTask
from tokenmill.api.engines.loaded import Prompt, _body, _engine_folder, _InOrder
from tokenmill.engine.engine import Answer, Usage
from tokenmill.errors import EngineDied, RequestRefused, TokenmillError

SLOTS = 2


@pytest.fixture
def background() -> Iterator[Background]:
    with Background() as started:
        yield started


class Fake:
    """Answers each prompt with itself; the first one waits until `slow_first` prompts were submitted."""

    def __init__(self, background: Background, *, slow_first: int = 0) -> None:
        self.background = background
        self.submitted = 0
        self.most_running = 0
        self._running = 0
        self._slow_first = slow_first

    def submit(self, prompt: Prompt) -> BackgroundTask[Answer]:
        self.submitted += 1
        if prompt == "refused":
            raise RequestRefused("no")
        return self.background.submit(self._answer(prompt, slow=self.submitted == 1))

    async def _answer(self, prompt: Prompt, *, slow: bool) -> Answer:
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        try:
            if slow:
                async with asyncio.timeout(60):
                    while self.submitted < self._slow_first:
                        await asyncio.sleep(0.001)
            if prompt == "dies":
                raise EngineDied("gone")
        finally:
            self._running -= 1
        return Answer(str(prompt), "stop", Usage(1, 1, None))


def texts(prompts: Iterable[Prompt], submit: Callable[[Prompt], BackgroundTask[Answer]]) -> list[str]:
    with _InOrder(prompts, submit, SLOTS) as requests:
        return [found.code if isinstance(found, TokenmillError) else found.text for found in requests.results()]


def test_answers_are_in_order_and_few_are_in_flight(background: Background) -> None:
    fake = Fake(background)
    prompts = [str(number) for number in range(50)]
    assert texts(prompts, fake.submit) == prompts
    assert fake.most_running <= 2 * SLOTS


def test_later_requests_are_started_while_the_first_answer_is_slow(background: Background) -> None:
    fake = Fake(background, slow_first=8 * SLOTS)
    prompts = [str(number) for number in range(50)]
    assert texts(prompts, fake.submit) == prompts


def test_prompts_are_read_lazily(background: Background) -> None:
    read: list[int] = []

    def endless() -> Iterator[str]:
        while True:
            read.append(len(read))
            yield str(read[-1])

    fake = Fake(background)
    with _InOrder(endless(), fake.submit, SLOTS) as requests:
        results = requests.results()
        assert read == []
        for number in range(5):
            answer = next(results)
            assert isinstance(answer, Answer)
            assert answer.text == str(number)
            assert len(read) <= number + 1 + 8 * SLOTS


def test_errors_are_in_order_too(background: Background) -> None:
    fake = Fake(background)
    assert texts(["a", "dies", "refused", "b"], fake.submit) == ["a", "engine_died", "invalid_request", "b"]


def test_nothing_is_left_running(background: Background) -> None:
    started: list[Prompt] = []
    cleaned: list[Prompt] = []

    async def forever(prompt: Prompt) -> Answer:
        started.append(prompt)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(prompt)
        raise AssertionError

    async def now() -> Answer:
        return Answer("a", "stop", Usage(1, 1, None))

    def submit(prompt: Prompt) -> BackgroundTask[Answer]:
        return background.submit(now() if prompt == "a" else forever(prompt))

    with _InOrder(["a", "b", "c"], submit, SLOTS) as requests:
        next(requests.results())
    assert cleaned == started


@pytest.mark.parametrize("prompt", [3, None, ["a"], [1, 2], object()])
def test_a_prompt_of_another_type_is_refused(prompt: Prompt) -> None:
    with pytest.raises(RequestRefused):
        _body(prompt)


def test_every_load_has_a_name_of_its_own_and_names_are_used_again(tmp_path: Path) -> None:
    with _engine_folder(tmp_path) as first:
        with _engine_folder(tmp_path) as second:
            assert first != second
            code = (
                "import sys; from pathlib import Path; from tokenmill.api.engines.loaded import _engine_folder\n"
                "with _engine_folder(Path(sys.argv[1])) as folder: print(folder)"
            )
            other = subprocess.run(
                [sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True
            )
            assert Path(other.stdout.strip()) not in (first, second)
        with _engine_folder(tmp_path) as third:
            assert third == second


def test_every_exported_name_exists() -> None:
    for name in tokenmill.__all__:
        assert getattr(tokenmill, name) is not None
    assert tokenmill.load.__module__ == tokenmill.Engine.__module__ == "tokenmill.api.engines.loaded"
