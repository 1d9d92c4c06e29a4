"""Parses the counters of llama.cpp servers (/metrics and /slots) and of vLLM (/metrics).

Pure. Metrics that a server does not report are None.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tokenmill.engine.engine import Counters

Samples = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]


def samples_of(text: str) -> Samples:
    """Parse Prometheus text into samples by name, up to the first invalid line."""
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    with suppress(ValueError):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def total(samples: Samples, name: str) -> int | None:
    """Sum of a metric over all labels; None if it is not reported."""
    values = samples.get(name)
    return None if values is None else round(sum(value for _, value in values))


def llama_counters(samples: Samples, slots: Sequence[Mapping[str, Any]] | None = None) -> Counters:
    """Counters of a llama.cpp server; ik_llama.cpp does not report cached tokens and steps."""
    cells = [slot["n_ctx"] for slot in slots or () if isinstance(slot.get("n_ctx"), int)]
    running = total(samples, "llamacpp:requests_processing")
    if running is None and slots is not None:
        running = sum(_busy(slot) for slot in slots)
    return Counters(
        prompt_tokens_computed=total(samples, "llamacpp:prompt_tokens_total"),
        prompt_tokens_reused=total(samples, "llamacpp:prompt_tokens_cached_total"),
        generated_tokens=total(samples, "llamacpp:tokens_predicted_total"),
        steps=total(samples, "llamacpp:n_decode_total"),
        cells_total=sum(cells) if cells else None,
        running=running,
        waiting=total(samples, "llamacpp:requests_deferred"),
    )


def vllm_counters(samples: Samples) -> Counters:
    """Counters of vLLM."""
    reused = total(samples, "vllm:prompt_tokens_cached_total")
    if reused is None:
        reused = total(samples, "vllm:prefix_cache_hits_total")
    prompt = total(samples, "vllm:prompt_tokens_total")
    used, cells = _cells(samples)
    return Counters(
        prompt_tokens_computed=None if prompt is None or reused is None else prompt - reused,
        prompt_tokens_reused=reused,
        generated_tokens=total(samples, "vllm:generation_tokens_total"),
        steps=total(samples, "vllm:iteration_tokens_total_count"),
        step_tokens=total(samples, "vllm:iteration_tokens_total_sum"),
        cells_used=used,
        cells_total=cells,
        running=total(samples, "vllm:num_requests_running"),
        waiting=total(samples, "vllm:num_requests_waiting"),
        preemptions=total(samples, "vllm:num_preemptions_total"),
    )


def cached_between(before: Counters, after: Counters, prompt_tokens: int) -> int | None:
    """Cached tokens of the only prompt processed between two readings; None if there were others."""
    values = (
        before.prompt_tokens_computed,
        before.prompt_tokens_reused,
        after.prompt_tokens_computed,
        after.prompt_tokens_reused,
    )
    if any(value is None for value in values):
        return None
    computed_before, reused_before, computed, reused = (value or 0 for value in values)
    alone = computed + reused - computed_before - reused_before == prompt_tokens
    return reused - reused_before if alone else None


def _busy(slot: Mapping[str, Any]) -> bool:
    return bool(slot["is_processing"]) if "is_processing" in slot else bool(slot.get("state"))


def _cells(samples: Samples) -> tuple[int | None, int | None]:
    infos = [labels for labels, _ in samples.get("vllm:cache_config_info", ())]
    share = [value for _, value in samples.get("vllm:kv_cache_usage_perc", ())]
    sizes = [(labels.get("num_gpu_blocks", ""), labels.get("block_size", "")) for labels in infos]
    if not sizes or not all(blocks.isdigit() and size.isdigit() for blocks, size in sizes):
        return None, None
    cells = sum(int(blocks) * int(size) for blocks, size in sizes)
    return (round(cells * sum(share) / len(share)) if share else None), cells
