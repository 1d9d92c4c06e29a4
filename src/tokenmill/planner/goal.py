"""The requirements of a plan. The planner chooses a value for every field that is None and records the reason."""

from dataclasses import dataclass
from typing import Literal

from tokenmill.model.profile import Profile
from tokenmill.planner.compute_graph.ik_options import IkOptions
from tokenmill.units import GIB, MIB

DialectName = Literal[
    "llama.cpp", "llama.cpp-2025", "ik_llama", "ik_llama-2026-04", "ik_llama-2026-03", "ik_llama-2025", "vllm"
]
"""Engines and the versions that the planner distinguishes; a name without a date is the current version.
llama.cpp-2025 stored K and V of a latent cache separately; ik_llama.cpp added `--fit` in March 2026, and since April it
no longer counts the compute buffer.
"""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding: what drafts tokens, and how many per step."""

    tokens: int = 3
    model: Profile | None = None  # None: the model's own layers for multi-token prediction
    source: str | None = None  # where the draft model's file is


@dataclass(frozen=True, slots=True)
class Goal:
    """Requirements of a plan and the resources it may use."""

    context: int | None = None  # tokens per sequence
    sequences: int | None = None  # decoded concurrently
    engine: DialectName = "llama.cpp"
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    ubatch: int | None = None  # micro-batch size of prefill, in tokens
    batch: int | None = None
    threads: int | None = None
    threads_batch: int | None = None
    cpu_only: bool = False
    gpus: tuple[int, ...] | None = None  # None: all GPUs
    reserve_ram_bytes: int = 0  # reserved for other programs; the operating system's reserve is separate
    reserve_cores: int = 0
    gpu_margin_bytes: int = 512 * MIB  # kept free on every GPU at full context
    cache_ram_bytes: int = 0  # host prompt cache (--cache-ram)
    mmap: bool | None = None
    mlock: bool = False
    repack: bool | None = None
    flash_attention: bool = True
    allow_disk: bool = False  # experts that exceed all memory may stay on disk and are read from there at every use
    own_fit: bool = False  # let the engine place layers by its own rule
    fit_margin_bytes: tuple[int, ...] = ()  # margin of `own_fit`: one value, or one per GPU
    ik: IkOptions | None = None  # ik_llama.cpp's options; None: the defaults of its version
    moe_cache_bytes: int = 0  # device cache for host experts, if the build supports it
    full_windows: bool = False  # sliding windows keep the whole context so that sequences can share it
    unified: bool | None = None  # one cache for all sequences; None: only with one sequence or `full_windows`
    offload_min_batch: int | None = None  # rows from which llama.cpp moves products with host experts to the GPU
    output_rows: int | None = None  # rows of logits per micro-batch; None: every token of it (upper bound)
    state_ids: int | None = None  # sequences and kept prefixes with a recurrent state each; None: sequences only
    gpu_memory_utilization: float = 0.9  # vLLM
    tensor_parallel: int = 1  # vLLM
    speculation: Speculation | None = None
    total_cells: int | None = None  # KV cells of all sequences; None: the full context for each
    shared_tokens: int = 0  # beginning that all sequences share, with `total_cells`


OS_RESERVE_BYTES = 4 * GIB  # kernel, page tables of a mapped model, shells and services of an idle server
OS_RESERVE_SHARE = 0.05  # the reserve is never more than this share of memory
