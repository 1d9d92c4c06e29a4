"""`tokenmill.load` with a real model: requests, errors, threads, and closing."""

import asyncio
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from tokenmill.api.progress import Progress
from tokenmill.config import Config
from tokenmill.engine.loading.progress import LoadProgress
from tokenmill.engine.process.identity import Pid
from tokenmill.errors import DoesNotFit, EngineError, RequestRefused, TokenmillError, UnknownModel, UsageError

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
SMALL: dict[str, Any] = {"context": 1024, "sequences": 2, "threads": 1, "threads_batch": 1}
RULES = " ".join(f"Rule {number}: a report names its author and its date." for number in range(20))
THINGS = ("river", "bridge", "harbour", "field", "engine", "tower", "garden")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return Config(state_dir=str(tmp_path_factory.mktemp("state")))


@pytest.fixture(scope="module")
def engine(smollm2_path: Path, config: Config) -> Iterator[tokenmill.Engine]:
    with tokenmill.load(smollm2_path, config=config, **SMALL) as loaded:
        yield loaded


def pid_of(engine: tokenmill.Engine) -> Pid:
    number = engine._engine.identity.pid
    assert number is not None
    found = Pid.of(number)
    assert found is not None
    return found


def test_the_plan_is_the_engine(engine: tokenmill.Engine) -> None:
    assert engine.plan is not None
    assert (engine.plan.settings.context, engine.plan.settings.sequences) == (1024, 2)
    assert (engine.context, engine.slots) == (1024, 2)
    assert engine.model


def test_chat(engine: tokenmill.Engine) -> None:
    answer = engine.chat("Say hello.", **GREEDY)
    assert isinstance(answer, tokenmill.Answer)
    assert answer.text
    assert str(answer) == answer.text
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    messages = [{"role": "user", "content": "Say hello."}]
    assert engine.chat(messages, **GREEDY).text == answer.text


def test_complete(engine: tokenmill.Engine) -> None:
    answer = engine.complete("One, two, three, four,", temperature=0, max_tokens=4)
    assert "five" in answer.text
    assert answer.usage.completion_tokens == 4
    assert answer.finish_reason == "length"
    assert engine.complete([1, 2, 3], max_tokens=1).usage.prompt_tokens == 3
    with pytest.raises(RequestRefused):
        engine.complete(3)  # type: ignore[arg-type]


def test_pieces_are_the_answer(engine: tokenmill.Engine) -> None:
    pieces = list(engine.stream("Tell me a story.", **GREEDY))
    assert len(pieces) > 1
    assert "".join(pieces) == engine.chat("Tell me a story.", **GREEDY).text
    completed = "".join(engine.stream({"prompt": "One, two, three,", "max_tokens": 4}, temperature=0))
    assert completed == engine.complete("One, two, three,", max_tokens=4, temperature=0).text


def test_a_stream_that_is_left_frees_its_slot(engine: tokenmill.Engine) -> None:
    for _ in range(3):  # more than there are slots
        stream = engine.stream("Tell me a long story.", ignore_eos=True, max_tokens=900)
        next(stream)
        stream.close()
    assert engine.chat("Say hello.", max_tokens=1)


def test_a_seed_repeats_an_answer(engine: tokenmill.Engine) -> None:
    drawn = [engine.chat("Say a word.", seed=7, temperature=1.5, max_tokens=12).text for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_map_keeps_the_order_and_shares_prefixes(engine: tokenmill.Engine) -> None:
    answers = list(engine.map([f"{RULES} Say a word about a {thing}." for thing in THINGS], **GREEDY))
    assert len(answers) == len(THINGS)
    prompt_tokens = answers[0].usage.prompt_tokens
    for answer in answers[1:]:
        assert answer.usage.cached_tokens is not None
        assert answer.usage.cached_tokens > 0.9 * prompt_tokens


def test_map_answers_as_chat_does(smollm2_path: Path, config: Config) -> None:
    """With one slot, because other prompts in the same micro-batch can change the logits."""
    prompts = ["Say hello.", "Name a colour.", "What is the capital of France?"]
    with tokenmill.load(smollm2_path, config=config, **{**SMALL, "sequences": 1}) as engine:
        chatted = [engine.chat(prompt, **GREEDY).text for prompt in prompts]
        assert [answer.text for answer in engine.map(iter(prompts), **GREEDY)] == chatted


def test_map_takes_bodies_and_lines(engine: tokenmill.Engine) -> None:
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 2},
    }
    bodies: list[Any] = [{"prompt": "One, two,", "max_tokens": 3}, line, [{"role": "user", "content": "Say hello."}]]
    assert [answer.usage.completion_tokens for answer in engine.map(bodies, temperature=0, max_tokens=1)] == [3, 2, 1]


def test_map_raises_or_returns_errors_in_order(engine: tokenmill.Engine) -> None:
    prompts: list[Any] = ["Say hello.", "word " * 3000, {"prompt": "x", "temperature": "hot"}, "Say hello."]
    returned = list(engine.map(prompts, errors="return", **GREEDY))
    codes = [found.code if isinstance(found, TokenmillError) else None for found in returned]
    assert codes == [None, "context_length_exceeded", "invalid_request", None]
    raising = engine.map(prompts, **GREEDY)
    assert next(raising).text
    with pytest.raises(TokenmillError) as caught:
        next(raising)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(UsageError):
        engine.map([], errors="ignore")  # type: ignore[call-overload]
    with pytest.raises(UsageError):  # not one prompt for each letter
        engine.map("Say hello.")


@pytest.mark.parametrize("body", [{"temperature": "hot"}, {"temprature": 1}, {"max_tokens": 0.5}, {"top_p": object()}])
def test_wrong_keys_are_refused_before_anything_runs(engine: tokenmill.Engine, body: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused) as caught:
        engine.chat("Say hello.", **body)
    assert caught.value.code == ("unknown_parameter" if "temprature" in body else "invalid_request")
    with pytest.raises(RequestRefused):
        engine.stream("Say hello.", **body)


def test_json_follows_a_schema(engine: tokenmill.Engine) -> None:
    schema = {"type": "object", "properties": {"answer": {"enum": ["yes", "no"]}}, "required": ["answer"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "choice", "schema": schema}}
    answer = engine.chat("Is water wet?", response_format=wanted, temperature=0, max_tokens=32)
    assert '"yes"' in answer.text or '"no"' in answer.text


def test_a_running_event_loop_and_other_threads(engine: tokenmill.Engine) -> None:
    async def in_a_loop() -> str:
        return engine.chat("Say hello.", max_tokens=2).text

    assert asyncio.run(in_a_loop())
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda thing: engine.chat(f"Say {thing}.", max_tokens=4), THINGS))
    assert [answer.usage.completion_tokens > 0 for answer in answers] == [True] * len(THINGS)


def test_loading_in_a_running_event_loop_with_another_engine_there(
    smollm2_path: Path, config: Config, engine: tokenmill.Engine
) -> None:
    events: list[Progress] = []

    async def in_a_loop() -> tokenmill.Engine:
        return tokenmill.load(smollm2_path, config=config, on_progress=events.append, **SMALL)

    second = asyncio.run(in_a_loop())
    pid = pid_of(second)
    assert pid != pid_of(engine)
    assert any(isinstance(event, LoadProgress) for event in events)
    stream = second.stream("Tell me a long story.", ignore_eos=True, max_tokens=900)
    next(stream)
    second.close()
    assert not pid.alive
    with pytest.raises(EngineError):
        list(stream)
    with pytest.raises(EngineError):
        second.chat("Say hello.")
    second.close()
    assert engine.chat("Say hello.", max_tokens=2).text


def test_an_engine_that_is_not_used_any_more_is_closed(smollm2_path: Path, config: Config) -> None:
    loaded = tokenmill.load(smollm2_path, config=config, **SMALL)
    pid = pid_of(loaded)
    assert pid.alive
    del loaded
    gc.collect()
    assert not pid.alive


def test_an_error_in_the_progress_callback_stops_the_load(smollm2_path: Path, config: Config) -> None:
    def fail(event: Progress) -> None:
        if isinstance(event, LoadProgress):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tokenmill.load(smollm2_path, config=config, on_progress=fail, **SMALL)
    with tokenmill.load(smollm2_path, config=config, **SMALL) as again:
        assert again.chat("Say hello.", max_tokens=2).text


def test_a_model_that_does_not_fit(smollm2_path: Path, config: Config) -> None:
    with pytest.raises(DoesNotFit) as caught:
        tokenmill.load(smollm2_path, config=config, reserve_ram="100 TiB")
    assert caught.value.code == "does_not_fit"
    assert caught.value.plan.shortfalls


def test_a_model_that_is_not_here(config: Config) -> None:
    with pytest.raises(UnknownModel):
        tokenmill.load("kimi-k2.5:Q4_K_S", config=config)
    with pytest.raises(UsageError):
        tokenmill.load("smollm2", config=config, contxt=4096)  # type: ignore[call-arg]


def test_a_server_is_started_and_another_load_uses_it_by_its_url(smollm2_path: Path, config: Config) -> None:
    with tokenmill.load(smollm2_path, config=config, engine="llama-server", **SMALL) as server:
        url = server._engine.identity.address

        async def in_a_loop() -> tokenmill.Engine:
            return tokenmill.load(config=config, engine=url)

        with asyncio.run(in_a_loop()) as client:
            assert client.plan is None
            [answer] = client.map(["Say hello."], **GREEDY)
            assert answer.text == server.chat("Say hello.", **GREEDY).text
        assert server.chat("Say hello.", **GREEDY).text == answer.text
