"""Request values over llama-server's defaults, seeds and log-probabilities, without a model."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.engine import Sampling
from tokenmill.errors import RequestRefused
from tokenmill.native.defaults import Defaults, defaults_of
from tokenmill.native.sampling.logprobs import largest, logprobs
from tokenmill.native.sampling.sampler import resolve, seed_of
from tokenmill.native.worker_config import sequences_for


def test_what_a_request_leaves_open_is_llama_servers() -> None:
    assert resolve(Sampling(), Defaults()) == Defaults(0.8, 40, 0.95, 0.05, 1.0, 0.0, 0.0, 64, 0.0, 0.1)
    assert resolve(Sampling(temperature=0, top_k=7), Defaults()) == Defaults(temperature=0, top_k=7)


def test_a_model_file_may_say_what_its_makers_want() -> None:
    keys = {"general.sampling.temp": "0.6", "general.sampling.top_k": "20", "general.sampling.min_p": "much"}
    assert defaults_of(keys.get) == Defaults(temperature=0.6, top_k=20)
    assert resolve(Sampling(temperature=1.0), defaults_of(keys.get)).temperature == 1.0


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=-0.1),
        Sampling(temperature=math.nan),
        Sampling(temperature=math.inf),
        Sampling(top_k=-2),
        Sampling(top_k=2**31),
        Sampling(top_p=1.1),
        Sampling(min_p=-0.5),
        Sampling(repeat_penalty=0.0),
        Sampling(repeat_penalty=math.inf),
        Sampling(presence_penalty=math.nan),
        Sampling(frequency_penalty=math.inf),
        Sampling(penalty_last_n=-1),
        Sampling(penalty_last_n=2**40),
    ],
)
def test_what_no_sampler_can_use_is_refused(sampling: Sampling) -> None:
    with pytest.raises(RequestRefused) as caught:
        resolve(sampling, Defaults())
    assert caught.value.hint


def test_seeds() -> None:
    assert seed_of(7) == 7
    assert seed_of(2**32 + 7) == 7
    assert seed_of(-1) != 0xFFFFFFFF  # llama-server's word for any, so one is drawn and can be told
    assert len({seed_of(None) for _ in range(8)}) > 1


def test_log_probabilities_are_those_of_the_softmax() -> None:
    logits = np.array([1.0, 3.0, 2.0, -50.0], np.float32)
    exact = logits - math.log(float(np.exp(logits.astype(np.float64)).sum()))
    logprob, best = logprobs(logits, 2, 3)
    assert logprob == pytest.approx(exact[2], abs=1e-5)
    assert [token for token, _ in best] == [1, 2, 0]
    assert [value for _, value in best] == pytest.approx([exact[1], exact[2], exact[0]], abs=1e-5)
    assert logprobs(logits, 0, 0)[1] == ()
    assert len(logprobs(logits, 0, 20)[1]) == 4


def test_large_logits_do_not_overflow() -> None:
    assert logprobs(np.array([3e4, 3e4, -3e4], np.float32), 0, 1)[0] == pytest.approx(-math.log(2), abs=1e-5)


@given(st.data())
def test_the_largest_are_the_first_of_a_stable_sort(data: st.DataObject) -> None:
    size, count = data.draw(st.sampled_from([1, 255, 256, 257, 3000, 20_000])), data.draw(st.integers(0, 80))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    logits = random.normal(size=size).astype(np.float32).round(data.draw(st.sampled_from([0, 1, 7])))  # some are equal
    assert largest(logits, count).tolist() == np.argsort(-logits, kind="stable")[:count].tolist()


@pytest.mark.parametrize(
    ("slots", "ids"), [(1, 53), (64, 116), (76, 127), (123, 127), (124, 176), (192, 244), (224, 255), (251, 255)]
)
def test_ids_for_what_runs_and_for_prefixes_that_are_kept(slots: int, ids: int) -> None:
    assert sequences_for(slots, 4) == ids
