"""Counters of servers, from the Prometheus text of llama.cpp's server and of vLLM, and from llama.cpp's slots.

Pure. A metric that a server does not have is None in the counters.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tokenmill.engine.engine import Counters

Samples = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]


def samples_of(text: str) -> Samples:
    """Every sample of a metrics page by its name, up to the first line that is not Prometheus text."""
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    with suppress(ValueError):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def total(samples: Samples, name: str) -> int | None:
    """A counter over all engines and labels; None where it is not there."""
    values = samples.get(name)
    return None if values is None else round(sum(value for _, value in values))


def llama_counters(samples: Samples, slots: Sequence[Mapping[str, Any]] | None = None) -> Counters:
    """Counters of llama.cpp's server; the fork's lacks the cached tokens and the steps."""
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
    """Reused tokens of the one prompt computed between two looks; None where it was not the only one."""
    looks = (
        before.prompt_tokens_computed,
        before.prompt_tokens_reused,
        after.prompt_tokens_computed,
        after.prompt_tokens_reused,
    )
    if any(look is None for look in looks):
        return None
    computed_before, reused_before, computed, reused = (look or 0 for look in looks)
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
