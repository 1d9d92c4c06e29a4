"""A real vLLM, planned, started, asked, killed and stopped by our own adapter.

One server for all tests of this folder, in this order: the last ones end it.
"""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator

import pytest

from support.vllm_served import CONTEXT, LANES, LIMIT_S, START_S, Served
from tokenmill.engine import logs
from tokenmill.engine.engine import Answer, Chat, Counters, Piece, Request, Sampling, answer
from tokenmill.engine.process.identity import Pid, descendants
from tokenmill.engine.reconcile.reconcile import observed, reconcile
from tokenmill.errors import EngineDied, RequestRefused, TooLong

GREEDY = Sampling(temperature=0.0)
CLERK = {"role": "system", "content": "You are a careful clerk. " + "Every line of the ledger counts. " * 60}

pytestmark = pytest.mark.timeout(2400)  # the first test waits for the start


def chat(text: str, *, tokens: int = 8, system: bool = True) -> Request:
    """A short greedy chat."""
    messages = (*((CLERK,) if system else ()), {"role": "user", "content": text})
    return Request(Chat(messages), GREEDY, max_tokens=tokens, ignore_eos=True)


async def collected(served: Served, request: Request) -> tuple[list[Piece], Answer]:
    """Every piece of a stream, and its answer."""
    pieces: list[Piece] = []
    async with asyncio.timeout(LIMIT_S):
        async for event in served.engine.stream(request):
            if isinstance(event, Answer):
                return pieces, event
            pieces.append(event)
    raise AssertionError("no answer")


def test_its_start_is_seen(served: Served) -> None:
    phases = [look.phase for look in served.seen]
    assert phases[0] == "starting"
    assert phases[-1] == "ready"
    assert {"reading", "context", "warming"} & set(phases)
    loaded = [look.bytes_loaded for look in served.seen if look.bytes_loaded is not None]
    assert loaded == sorted(loaded)
    assert loaded[-1] == served.seen[-1].bytes_total


def test_it_says_what_it_is(served: Served) -> None:
    identity = served.engine.identity
    assert (identity.kind, identity.model, identity.build) == ("vllm", "tiny-moe", "vLLM 0.32.0")
    assert (identity.context, identity.slots) == (CONTEXT, LANES)
    assert served.engine.capabilities.shares_prefixes
    assert served.engine.capabilities.interactive_first


def test_its_log_agrees_with_the_plan(served: Served) -> None:
    log = logs.read("vllm", served.log)
    assert log.build == "0.32.0"
    assert log.hint is not None
    assert log.hint.phase == "ready"
    assert log.kv_tokens == CONTEXT * LANES + 32  # and the block that vLLM keeps for itself
    found = reconcile(served.plan, observed(log))
    cache = next(row for row in found.rows if row.item == "kv")
    assert cache.predicted_bytes == served.plan.ledger.of("dram", "kv")
    assert not [row for row in found.flagged if row.measured_bytes]  # the log does not tell of weights


def test_a_chat_is_streamed(served: Served, runner: asyncio.Runner) -> None:
    pieces, final = runner.run(collected(served, chat("What is the sum?", tokens=12)))
    assert len(pieces) > 3
    assert "".join(piece.text for piece in pieces) == final.text != ""
    assert sum(piece.tokens for piece in pieces) == final.usage.completion_tokens == 12
    assert final.finish_reason == "length"


def test_text_and_its_tokens_are_completed_alike(served: Served, runner: asyncio.Runner) -> None:
    async def both() -> tuple[tuple[int, ...], Answer, Answer]:
        async with asyncio.timeout(LIMIT_S):
            tokens = await served.engine.tokenize("Once upon a time, in 1984")
            asked = [Request(prompt, GREEDY, max_tokens=6) for prompt in ("Once upon a time, in 1984", tokens)]
            first, second = [await answer(served.engine, request) for request in asked]
            return tokens, first, second

    tokens, first, second = runner.run(both())
    assert first.usage.prompt_tokens == second.usage.prompt_tokens == len(tokens)
    assert first.text == second.text


def test_probabilities_come_with_the_text(served: Served, runner: asyncio.Runner) -> None:
    request = Request("Once upon a time", Sampling(temperature=0.0, top_logprobs=3), max_tokens=4, ignore_eos=True)
    _, final = runner.run(collected(served, request))
    assert final.logprobs is not None
    assert len(final.logprobs) == 4
    for token in final.logprobs:
        assert len(token.top) >= 3
        assert max(other.logprob for other in token.top) == pytest.approx(token.logprob)


def test_a_grammar_is_obeyed_and_a_broken_one_refused(served: Served, runner: asyncio.Runner) -> None:
    def asked(grammar: str) -> Request:
        return Request(Chat(({"role": "user", "content": "Well?"},)), Sampling(grammar=grammar), max_tokens=8)

    _, final = runner.run(collected(served, asked('root ::= "yes" | "no"')))
    assert final.text in ("yes", "no")
    with pytest.raises(RequestRefused, match="grammar"):
        runner.run(collected(served, asked("root ::= (")))


def test_a_head_is_computed_once(served: Served, runner: asyncio.Runner) -> None:
    async def counted(text: str) -> tuple[Answer, int, int]:
        before = await served.counters()
        _, final = await collected(served, chat(text))
        after = await served.counters()
        assert after.prompt_tokens_computed is not None
        assert after.prompt_tokens_reused is not None
        return (
            final,
            after.prompt_tokens_computed - (before.prompt_tokens_computed or 0),
            after.prompt_tokens_reused - (before.prompt_tokens_reused or 0),
        )

    runner.run(counted("Warm up the head."))
    final, computed, reused = runner.run(counted("And the difference?"))
    head = len(runner.run(served.engine.tokenize(Chat((CLERK,)))))
    assert final.usage.cached_tokens == reused
    assert final.usage.prompt_tokens == computed + reused
    assert head - 64 < reused <= head  # whole blocks of 32


def test_a_prompt_beyond_the_context_is_told_so(served: Served, runner: asyncio.Runner) -> None:
    with pytest.raises(TooLong) as caught:
        runner.run(collected(served, Request("word " * 5000, GREEDY, max_tokens=4)))
    assert caught.value.context_tokens == CONTEXT
    assert caught.value.needed_tokens > CONTEXT


def test_a_cancelled_stream_frees_its_sequence(served: Served, runner: asyncio.Runner) -> None:
    async def cancelled() -> tuple[Counters, Counters]:
        async with asyncio.timeout(LIMIT_S):
            before = await served.counters()
            stream = served.engine.stream(chat("Count on.", tokens=3000))
            await anext(stream)
            await stream.aclose()
            while (after := await served.counters()).running != 0:
                await asyncio.sleep(0.05)
            return before, after

    before, after = runner.run(cancelled())
    assert before.generated_tokens is not None
    assert after.generated_tokens is not None
    assert 0 < after.generated_tokens - before.generated_tokens < 3000
    assert after.cells_used == 0


async def drained(stream: AsyncGenerator[Piece | Answer, None]) -> None:
    """Read a stream to its end."""
    async for _ in stream:
        pass


def tree(served: Served) -> list[Pid]:
    """Every process of the server, its supervisor's too."""
    process = served.server.process
    assert process is not None
    numbers = (process.supervisor.pid, *descendants(process.supervisor.pid))
    return [found for found in map(Pid.of, numbers) if found is not None]


def test_a_killed_server_is_noticed_and_comes_back(served: Served, runner: asyncio.Runner) -> None:
    async def killed() -> tuple[list[Pid], Answer]:
        first = tree(served)
        pid = served.engine.identity.pid
        assert pid is not None
        stream = served.engine.stream(chat("Count on.", tokens=3000))
        await anext(stream)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="SIGKILL"):
            await asyncio.wait_for(drained(stream), LIMIT_S)
        async with asyncio.timeout(START_S):
            back = await answer(served.engine, chat("Are you back?"))
        return first, back

    first, back = runner.run(killed())
    assert len(first) >= 4  # supervisor, server, engine core, worker
    assert not [pid for pid in first if pid.alive]
    assert back.usage.completion_tokens == 8
    assert runner.run(served.counters()).restarts == 1


def test_a_clean_stop_leaves_no_process(served: Served, runner: asyncio.Runner) -> None:
    first = tree(served)
    assert len(first) >= 4
    assert runner.run(answer(served.engine, chat("Once more."))).usage.completion_tokens == 8

    async def closed() -> None:
        async with asyncio.timeout(LIMIT_S):
            await served.engine.close()

    runner.run(closed())
    assert not [pid for pid in first if pid.alive]
