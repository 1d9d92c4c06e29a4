"""The llama-server of the wheel, started from a plan: everything that an engine must support."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.servers import EMBEDDED, run, small_plan, until
from tokenmill.config import EngineConfig
from tokenmill.engine.engine import Answer, Chat, Piece, Request, Sampling, answer
from tokenmill.engine.loading.progress import LoadProgress
from tokenmill.engine.process import registry
from tokenmill.engine.server.client import ServerEngine
from tokenmill.engine.start import attach
from tokenmill.errors import EngineError, RequestRefused, TooLong, UsageError
from tokenmill.model.identity import identity_of
from tokenmill.native.launching import adopt, start

GREEDY = Sampling(temperature=0.0)
LONG = "Every line of the ledger counts. " * 20


def chat(text: str) -> Chat:
    return Chat(({"role": "system", "content": LONG}, {"role": "user", "content": text}))


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Path]:
    """A state folder with one detached engine, shared by all tests that do not stop it."""
    folder = tmp_path_factory.mktemp("state")
    looks: list[LoadProgress] = []

    async def begin() -> None:
        engine = await start(
            small_plan(smollm2_path),
            model_path=smollm2_path,
            config=EMBEDDED,
            state=folder,
            name="one",
            progress=looks.append,
            detach=True,
        )
        await engine.close()

    run(begin)
    assert looks[-1].phase == "ready"
    assert looks[-1].bytes_loaded == looks[-1].bytes_total == smollm2_path.stat().st_size
    yield folder

    async def end() -> None:
        engine = await adopt(folder, "one")
        assert isinstance(engine, ServerEngine)
        await engine.stop()
        assert registry.listed(folder) == ()

    run(end)


async def adopted(state: Path) -> ServerEngine:
    engine = await adopt(state, "one")
    assert isinstance(engine, ServerEngine)
    return engine


def test_what_answers(state: Path, smollm2_path: Path) -> None:
    async def scene() -> None:
        engine = await adopted(state)
        [record] = registry.listed(state)
        identity = engine.identity
        assert (identity.kind, identity.context, identity.slots) == ("llama-server", 512, 2)
        assert identity.build == "llama.cpp b11549 (xllamacpp 2026.10.11549)"
        assert identity.model_id == identity_of(smollm2_path)
        assert identity.pid == record.engine.pid
        assert identity.address.startswith("http://127.0.0.1:")
        assert engine.capabilities.chooses_slots
        assert engine.capabilities.reports_cached_tokens
        assert not engine.capabilities.tools_parsed, "SmolLM2's template does not support tools"
        status = await engine.status()
        assert (status.state, status.counters.running) == ("ready", 0)
        await engine.close()
        assert record.alive, "closing does not stop a detached engine"

    run(scene)


def test_a_chat_streamed_and_its_head_reused(state: Path) -> None:
    async def scene() -> None:
        engine = await adopted(state)
        request = Request(chat("What counts?"), replace(GREEDY, top_logprobs=2), max_tokens=6, slot=0)
        events = [event async for event in engine.stream(request)]
        done, pieces = events[-1], [event for event in events[:-1] if isinstance(event, Piece)]
        assert isinstance(done, Answer)
        assert "".join(piece.text for piece in pieces) == done.text != ""
        assert sum(piece.tokens for piece in pieces) == done.usage.completion_tokens == 6
        assert done.finish_reason == "length"
        assert done.logprobs is not None
        assert len(done.logprobs) == 6
        assert all(len(entry.top) == 2 for entry in done.logprobs)
        assert done.message == {"role": "assistant", "content": done.text}
        assert done.usage.prompt_tokens == len(await engine.tokenize(request.prompt))
        again = await answer(engine, replace(request, prompt=chat("What does not?")))
        assert again.usage.cached_tokens is not None
        assert again.usage.cached_tokens > 0.8 * again.usage.prompt_tokens
        assert again.timings.prefill_s is not None
        await engine.close()

    run(scene)


def test_text_and_tokens_are_the_same_prompt(state: Path) -> None:
    async def scene() -> None:
        engine = await adopted(state)
        tokens = await engine.tokenize("Once upon a time")
        text = await answer(engine, Request("Once upon a time", GREEDY, max_tokens=5))
        same = await answer(engine, Request(tokens, GREEDY, max_tokens=5))
        assert text.text == same.text != ""
        assert text.message is None
        stopped = await answer(engine, Request("Once upon a time", GREEDY, max_tokens=5, stop=(text.text[-4:],)))
        assert text.text.startswith(stopped.text)
        assert stopped.finish_reason == "stop"
        await engine.close()

    run(scene)


def test_lanes_keep_their_heads(state: Path) -> None:
    async def scene() -> None:
        engine = await adopted(state)
        heads = [f"{name} " * 60 for name in ("red", "blue")]
        for lane, head in enumerate(heads):
            await answer(engine, Request(head, GREEDY, max_tokens=1, slot=lane))
        for lane, head in enumerate(heads):
            done = await answer(engine, Request(head + "end", GREEDY, max_tokens=1, slot=lane))
            assert done.slot == lane
            assert done.usage.cached_tokens is not None
            assert done.usage.cached_tokens >= 55
        crossed = await answer(engine, Request(heads[0] + "end", GREEDY, max_tokens=1, slot=1))
        assert crossed.usage.cached_tokens == 0, "slots do not share prefixes"
        with pytest.raises(RequestRefused, match="slot 2"):
            await answer(engine, Request("x", slot=2))
        await engine.close()

    run(scene)


def test_grammars_schemas_and_biases_are_obeyed(state: Path) -> None:
    async def scene() -> None:
        engine = await adopted(state)
        short = Chat(({"role": "user", "content": "Well?"},))
        grammar = Sampling(temperature=0.0, grammar='root ::= "yes" | "no"')
        assert (await answer(engine, Request(short, grammar, max_tokens=8))).text in ("yes", "no")
        schema = json.dumps({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})
        for prompt in (short, "JSON:"):
            done = await answer(engine, Request(prompt, Sampling(temperature=0.0, json_schema=schema), max_tokens=40))
            assert isinstance(json.loads(done.text)["ok"], bool)
        plain = Request("Once upon a", replace(GREEDY, top_logprobs=0), max_tokens=1)
        likeliest = await answer(engine, plain)
        assert likeliest.logprobs is not None
        token = likeliest.logprobs[0].token
        assert token is not None
        banned = replace(GREEDY, logit_bias=((token, -math.inf),))
        assert (await answer(engine, replace(plain, sampling=banned))).text != likeliest.text
        with pytest.raises(RequestRefused, match="grammar"):
            await answer(engine, Request(short, Sampling(grammar="root ::= (")))
        await engine.close()

    run(scene)


def test_too_long_and_other_refusals(state: Path) -> None:
    async def scene() -> None:
        engine = await adopted(state)
        with pytest.raises(TooLong) as refused:
            await answer(engine, Request("word " * 600, max_tokens=1))
        assert (refused.value.needed_tokens, refused.value.context_tokens) == (602, 512)
        with pytest.raises(RequestRefused, match="content"):
            await answer(engine, Request(Chat(({"role": "user"},))))
        with pytest.raises(RequestRefused, match="tools"):
            await answer(engine, Request(replace(chat("x"), tools=({"type": "function"},))))
        await engine.close()

    run(scene)


def test_a_stream_that_is_left_frees_its_slot(state: Path) -> None:
    async def scene() -> None:
        engine = await adopted(state)
        stream = engine.stream(Request("Once upon a time", GREEDY, max_tokens=480, ignore_eos=True, slot=0))
        async for _ in stream:
            break
        assert (await engine.status()).counters.running == 1
        await stream.aclose()

        async def idle() -> bool:
            return (await engine.status()).counters.running == 0

        await until(idle)
        counters = (await engine.status()).counters
        assert counters.generated_tokens is not None
        await engine.close()

    run(scene)


def test_slots_survive_a_file_on_this_build(state: Path) -> None:
    async def scene() -> None:
        engine = await adopted(state)
        with pytest.raises(EngineError, match="verified"):
            await engine.save_slot(0, "x.bin")
        folder = state / "engines/one/slots"
        works, details = await engine.verify_saved_slots(folder)
        assert works, details
        assert "reused" in details
        assert list(folder.iterdir()) == []
        assert engine.capabilities.saves_prefixes
        await answer(engine, Request(LONG, GREEDY, max_tokens=1, slot=0))
        saved = await engine.save_slot(0, "head.bin")
        assert await engine.restore_slot(1, "head.bin") == saved
        moved = await answer(engine, Request(LONG + "So", GREEDY, max_tokens=1, slot=1))
        assert moved.usage.cached_tokens is not None
        assert moved.usage.cached_tokens > 0.8 * moved.usage.prompt_tokens
        await engine.close()

    run(scene)


def test_attached_to_by_its_address_it_is_known_for_what_it_is(state: Path) -> None:
    async def scene() -> None:
        [record] = registry.listed(state)
        engine = await attach(f"{record.address}/v1", EngineConfig())
        assert (engine.identity.kind, engine.identity.slots, engine.identity.pid) == ("llama-server", 2, None)
        assert (await answer(engine, Request("Once", GREEDY, max_tokens=1))).usage.completion_tokens == 1
        with pytest.raises(UsageError, match="no model other"):
            await attach(record.address, EngineConfig(), model="other")
        await engine.close()

    run(scene)


def test_a_name_is_not_started_twice(state: Path, smollm2_path: Path) -> None:
    async def scene() -> None:
        with pytest.raises(EngineError, match="engine one is already running"):
            await start(small_plan(smollm2_path), model_path=smollm2_path, config=EMBEDDED, state=state, name="one")

    run(scene)
