"""Quality checks of a real model, compared with itself and with a damaged copy."""

from dataclasses import replace
from pathlib import Path

import pytest

from support.damaged import damaged
from support.native_engine import native, plan_for, run
from tokenmill.config import EngineConfig
from tokenmill.errors import UsageError
from tokenmill.native.launching import start
from tokenmill.tuner.qualify.agreement import TextReading, compare, read_texts
from tokenmill.tuner.qualify.result import MAX_KL, QualifyStep, agreed
from tokenmill.tuner.qualify.run import needles
from tokenmill.tuner.qualify.tasks import asks

TEXTS = asks().texts[:2]
POSITIONS = 20


def read(model: Path, state: Path) -> TextReading:
    async def work() -> TextReading:
        async with native(model, state, plan=plan_for(model, context=512, sequences=1)) as engine:
            reading = await read_texts(engine, TEXTS, POSITIONS)
            reused = (await engine.status()).counters.prompt_tokens_reused
            assert reused is not None
            assert reused > 10 * POSITIONS  # each position found what came before it
            return reading

    return run(work)


@pytest.fixture(scope="module")
def reading(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> TextReading:
    return read(smollm2_path, tmp_path_factory.mktemp("state"))


def test_a_model_agrees_with_itself(reading: TextReading, smollm2_path: Path, tmp_path: Path) -> None:
    found = compare(read(smollm2_path, tmp_path), reading)
    assert found.positions == 2 * POSITIONS
    assert found.same_top == 1.0
    assert found.kl_max < 1e-6
    assert found.perplexity == pytest.approx(found.perplexity_reference)
    assert agreed(found).good


def test_a_damaged_copy_does_not_agree(reading: TextReading, smollm2_path: Path, tmp_path: Path) -> None:
    found = compare(read(damaged(smollm2_path, tmp_path / "damaged.gguf"), tmp_path), reading)
    check = agreed(found)
    assert not check.good
    assert found.kl_mean > MAX_KL
    assert found.same_top < 0.9
    assert found.perplexity is not None
    assert found.perplexity_reference is not None
    assert found.perplexity > 1.1 * found.perplexity_reference
    assert check.failures


def test_a_server_reads_as_the_native_engine_does(reading: TextReading, smollm2_path: Path, tmp_path: Path) -> None:
    async def work() -> TextReading:
        plan = plan_for(smollm2_path, context=512, sequences=1)
        config = EngineConfig(kind="llama-server", port=0)
        engine = await start(plan, model_path=smollm2_path, config=config, state=tmp_path, name="server")
        try:
            return await read_texts(engine, TEXTS[:1], POSITIONS)
        finally:
            await engine.close()

    part = replace(reading, tokens=reading.tokens[:1])
    found = compare(run(work), part)
    assert found.positions == POSITIONS
    assert found.same_top >= 0.9
    assert found.kl_mean < 0.01  # prompts are cut into other chunks there


def test_another_vocabulary_cannot_be_compared(reading: TextReading) -> None:
    other = replace(reading, tokens=tuple(tuple(token + 1 for token in tokens) for tokens in reading.tokens))
    with pytest.raises(UsageError, match="different vocabularies"):
        compare(reading, other)


def test_questions_find_the_document_again(smollm2_path: Path, tmp_path: Path) -> None:
    steps: list[QualifyStep] = []

    async def work() -> None:
        async with native(smollm2_path, tmp_path, plan=plan_for(smollm2_path, context=768, sequences=2)) as engine:
            found = await needles(engine, (256,), places=(0.5, 0.95), tell=steps.append)
            assert found.asked == 2
            counters = (await engine.status()).counters
            assert counters.prompt_tokens_reused is not None
            assert counters.prompt_tokens_reused > 200

    run(work)
    assert [step.done for step in steps] == [1, 2]
