"""Constants of the speed forecast, loaded once from rates.toml, which documents the source and certainty of each.

The forecast takes them as an argument, so that a fit can try other values. Independent of machines and models.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

from tokenmill.decode import read_toml

Sure = Literal["measured", "well", "fairly", "poorly"]
QuantFamily = Literal["float", "q8", "linear", "low", "table", "grid", "trellis"]


@dataclass(frozen=True, slots=True)
class Constant:
    """One row of rates.toml."""

    value: float
    unit: str
    stands_for: str
    source: str  # measurements it was fitted to, or the document it was taken from
    sure: Sure
    bounds: tuple[float, float] | None = None  # bounds of the fit; None: not fitted


@dataclass(frozen=True, slots=True)
class CardRow:
    """Peak compute rate of one GPU: dense half precision with single-precision accumulation."""

    tflops: float
    source: str


@dataclass(frozen=True, slots=True)
class RangeRow:
    """Factors on a forecast between which 80 % of the published runs of one class of machines lie."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class RatesTable:
    """rates.toml."""

    constants: dict[str, Constant]
    cards: dict[str, CardRow] = field(default_factory=dict)
    ranges: dict[str, dict[str, RangeRow]] = field(default_factory=dict)  # class -> decode or prefill -> factors


@dataclass(frozen=True, slots=True)
class RateConstants:
    """Values of the constants; rates.toml documents each."""

    # CPU memory
    ddr4_fraction: float
    ddr5_fraction: float
    measured_fraction: float
    core_stream_gb_s: float
    core_stream_xeon_gb_s: float
    chiplet_bytes_per_clock: float
    chiplet_clock_zen4_ghz: float
    chiplet_clock_zen5_ghz: float
    numa_fraction: float
    pmem_fraction: float
    memory_mode_ratio: float
    memory_mode_mts: float
    cache_reuse: float
    # CPU arithmetic
    unpack_core: float
    unpack_vnni: float
    unpack_wide: float
    unpack_ik: float
    unpack_float: float
    unpack_q8: float
    unpack_low: float
    unpack_table: float
    unpack_grid: float
    unpack_trellis: float
    overlap: float
    cpu_op_s: float
    cpu_op_growth: float
    virtual_core: float
    shared_virtual_core: float
    virtual_host: float
    shared_core: float
    all_cores: float
    all_cores_virtual: float
    crowding: float
    cpu_attention_ns: float
    cpu_attention_ik: float
    cpu_attention_prefill: float
    cpu_attention_ik_prefill: float
    cpu_attention_threads: float
    cpu_matmul_gflops: float
    cpu_matmul_vnni: float
    cpu_matmul_wide: float
    cpu_matmul_ik: float
    cpu_matmul_rows: float
    # GPUs
    gpu_fraction: float
    gpu_copy_fraction: float
    gpu_expert_gb_s: float
    gpu_cache_fraction: float
    gpu_latent_fraction: float
    gpu_unpack_grid: float
    gpu_op_s: float
    gpu_graph_op_s: float
    gpu_dense_fraction: float
    gpu_matmul_fraction: float
    gpu_matmul_rows: float
    gpu_matmul_half: float
    gpu_attention_fraction: float
    gpu_attention_row_tflops: float
    datacenter_fraction: float
    # links between devices, and engine overhead
    host_hop_s: float
    gpu_hop_s: float
    pcie_fraction: float
    pageable_gb_s: float
    step_s: float
    draw_ns: float
    vllm_step_s: float
    vllm_matmul_fraction: float
    # loading
    read_copy_gb_s: float
    read_pinned_gb_s: float
    gpu_start_s: float

    def unpack_cost(self, family: QuantFamily) -> float:
        """Cost of unpacking one weight relative to a 4-bit linear one."""
        return {
            "float": self.unpack_float,
            "q8": self.unpack_q8,
            "linear": 1.0,
            "low": self.unpack_low,
            "table": self.unpack_table,
            "grid": self.unpack_grid,
            "trellis": self.unpack_trellis,
        }[family]


@cache
def table() -> RatesTable:
    """rates.toml, read once."""
    with resources.as_file(resources.files(__package__) / "rates.toml") as path:
        return read_toml(RatesTable, Path(path))


@cache
def standard() -> RateConstants:
    """The default constants."""
    return from_constants(table().constants)


def from_constants(constants: Mapping[str, Constant]) -> RateConstants:
    """Build the constants by name; raises `KeyError` for a missing one."""
    return RateConstants(**{item.name: constants[item.name].value for item in fields(RateConstants)})


def card_tflops(name: str) -> float | None:
    """Half-precision TFLOPS of a GPU; None if unknown. The longest name in the table that `name` contains wins."""
    found = [known for known in table().cards if known.casefold() in name.casefold()]
    return table().cards[max(found, key=len)].tflops if found else None


_FAMILIES: tuple[tuple[QuantFamily, str], ...] = (
    ("float", r"(F|BF)(16|32|64)"),
    ("q8", r"(Q8|F8|FP8|I8)"),
    ("trellis", r"IQ\d_KT"),
    ("low", r"(Q2_K|Q3_K|TQ)"),
    ("grid", r"IQ1_|IQ2_(X|S)|IQ3_(X|S)"),
    ("linear", r"IQ4_NL"),
    ("table", r"IQ"),
)


@cache
def family(type_name: str) -> QuantFamily:
    """The family of a quantization type, which determines its unpacking cost; the first matching pattern wins."""
    name = type_name.upper()
    return next((found for found, pattern in _FAMILIES if re.match(pattern, name)), "linear")


_CUDA_ROWS = re.compile(r"IQ([2-5]_K|[45]_KS|1_[SM])_R4")


@cache
def is_cpu_only(type_name: str) -> bool:
    """Whether only the CPU reads a type: rows interleaved for it, except those that ik_llama.cpp's GPU kernels know."""
    name = type_name.upper()
    return re.search(r"_R\d+$", name) is not None and _CUDA_ROWS.fullmatch(name) is None
