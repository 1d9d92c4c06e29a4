"""A model with NaN in its weights gives an error instead of an answer."""

from dataclasses import replace
from pathlib import Path

import pytest

from support.native_engine import chat, native, plan_for, run
from support.tiny_models import write_nan
from tokenmill.engine.engine import Sampling, answer
from tokenmill.errors import NonFiniteLogits

SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, top_k=40, seed=1),
    Sampling(temperature=1.0, top_k=0, repeat_penalty=1.2, seed=1),
    Sampling(temperature=0.0, top_logprobs=3),
    Sampling(temperature=0.0, json_schema='{"type": "boolean"}'),
]


def test_non_finite_logits_are_an_error(tmp_path: Path) -> None:
    model = write_nan(tmp_path)

    async def work() -> None:
        async with native(model, tmp_path, plan=plan_for(model, context=256)) as engine:
            for sampling in SAMPLINGS:
                with pytest.raises(NonFiniteLogits) as caught:
                    await answer(engine, replace(chat("Hello?", tokens=4), sampling=sampling))
                assert caught.value.code == "non_finite_logits"
                assert "models verify" in (caught.value.hint or "")

    run(work)
