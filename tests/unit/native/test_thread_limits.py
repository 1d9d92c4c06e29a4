"""Thread counts beyond ggml's limit are refused."""

import pytest

from tokenmill.cli.options import GoalOptions
from tokenmill.config import MAX_THREADS
from tokenmill.errors import UsageError
from tokenmill.native.llama.settings import ContextSettings


@pytest.mark.parametrize("name", ["threads", "threads_batch"])
def test_an_option(name: str) -> None:
    most: dict[str, int] = {name: MAX_THREADS}
    assert getattr(GoalOptions(**most).goal_for("llama.cpp"), name) == MAX_THREADS  # type: ignore[arg-type]
    for wrong in (0, MAX_THREADS + 1, 100_000):
        given: dict[str, int] = {name: wrong}
        with pytest.raises(UsageError) as caught:
            GoalOptions(**given).goal_for("llama.cpp")  # type: ignore[arg-type]
        assert (caught.value.code, str(wrong) in caught.value.message) == ("invalid_usage", True)


@pytest.mark.parametrize("name", ["threads", "threads_batch"])
@pytest.mark.parametrize("wrong", [-1, 0, MAX_THREADS + 1])
def test_what_a_worker_is_given(name: str, wrong: int) -> None:
    given: dict[str, int] = {name: wrong}
    with pytest.raises(UsageError):
        ContextSettings(cells=64, context=64, **given)  # type: ignore[arg-type]
