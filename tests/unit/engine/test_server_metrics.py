"""Counters from metrics of real servers, and cached tokens from two readings."""

import pytest

from support.http_answers import captured
from tokenmill.engine.engine import Counters
from tokenmill.engine.server.metrics import cached_between, llama_counters, samples_of, total, vllm_counters

IK = """# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 6886
llamacpp:prompt_seconds_total 2903.63
llamacpp:tokens_predicted_total 3469
llamacpp:tokens_predicted_seconds_total 3544.27
"""  # as shown in ik_llama.cpp#695


def test_llama() -> None:
    counters = llama_counters(samples_of(captured("llama-metrics").text), captured("llama-slots").body)
    assert counters.prompt_tokens_computed == 32 + 1 + 1 + 2
    assert counters.prompt_tokens_reused == 31 + 31
    assert counters.generated_tokens == 4 + 1 + 2 + 2
    assert (counters.running, counters.waiting, counters.cells_total) == (0, 0, 1024)
    assert counters.steps is not None
    assert counters.decode_s is None, "times of slots overlap"


def test_ik_llama_has_fewer() -> None:
    assert llama_counters(samples_of(IK)) == Counters(prompt_tokens_computed=6886, generated_tokens=3469)


@pytest.mark.parametrize(
    ("slots", "running"),
    [([{"is_processing": True}, {"is_processing": False}], 1), ([{"state": 1}, {"state": 0}], 1), ([], 0)],
)
def test_without_metrics_slots_tell_who_works(slots: list[dict[str, object]], running: int) -> None:
    assert llama_counters({}, slots).running == running


def test_vllm() -> None:
    counters = vllm_counters(samples_of(captured("vllm-metrics").text))
    assert counters == Counters(
        prompt_tokens_computed=5445,
        prompt_tokens_reused=7072,
        generated_tokens=3888,
        steps=3888,
        step_tokens=9333,
        cells_used=0,
        cells_total=2048 * 32,
        running=0,
        waiting=0,
        preemptions=0,
    )


def test_older_vllm_counts_hits_alone() -> None:
    page = 'vllm:prefix_cache_hits_total{engine="0"} 3.0\nvllm:prompt_tokens_total{engine="0"} 5.0\n'
    counters = vllm_counters(samples_of(page))
    assert (counters.prompt_tokens_computed, counters.prompt_tokens_reused, counters.cells_total) == (2, 3, None)


def test_engines_are_added_up() -> None:
    assert total(samples_of('a{engine="0"} 1\na{engine="1"} 2.0\n'), "a") == 3
    assert total(samples_of(""), "a") is None


def test_labels_may_hold_anything() -> None:
    [(labels, value)] = samples_of('a{x="1,}\\"{",y="2"} +Inf 123\nnot a sample\na{b} c d\n')["a"]
    assert labels == {"x": '1,}"{', "y": "2"}
    assert value == float("inf")


@pytest.mark.parametrize(
    ("before", "after", "prompt", "cached"),
    [
        (Counters(prompt_tokens_computed=10, prompt_tokens_reused=5), (14, 11), 10, 6),
        (Counters(prompt_tokens_computed=10, prompt_tokens_reused=5), (14, 11), 9, None),
        (Counters(), (14, 11), 10, None),
    ],
)
def test_reuse_between_two_looks(before: Counters, after: tuple[int, int], prompt: int, cached: int | None) -> None:
    later = Counters(prompt_tokens_computed=after[0], prompt_tokens_reused=after[1])
    assert cached_between(before, later, prompt) == cached
