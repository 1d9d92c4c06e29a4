"""Further published runs, mostly of dense models, whose shapes are given here.

Each group names its source, and the facts that it leaves open.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from support.run_models import model
from support.runs import Figure, all_on_cards, on_cards, on_processors, settings
from tokenmill.hardware.catalog import find
from tokenmill.hardware.machine import Cpu, Dram, Gpu, Machine, PcieLink
from tokenmill.model.profile import Experts, LayerCache, Profile, Tensor, TensorClass
from tokenmill.model.tensor_types import tensor_bytes
from tokenmill.planner.plan import Placement, Settings

_AVX512 = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16")
_AVX2 = ("avx2", "fma", "f16c")


@dataclass(frozen=True, slots=True)
class _Shape:
    """A model with plain attention."""

    layers: int
    embed: int
    heads: int
    kv_heads: int
    head: int
    ff: int
    vocabulary: int
    experts: Experts | None = None

    def typed(self, kind: str, output: str | None = None) -> Profile:
        """The model with one type for all matrices, and another for the output."""
        rows: list[Tensor] = []

        def add(name: str, cls: TensorClass, layer: int | None, *shape: int, of: str = kind) -> None:
            rows.append(Tensor(name, cls, layer, shape, of, tensor_bytes(of, shape), prod(shape)))

        add("token_embd.weight", TensorClass.EMBEDDING, None, self.embed, self.vocabulary)
        add("output.weight", TensorClass.OUTPUT, None, self.embed, self.vocabulary, of=output or kind)
        q, kv = self.heads * self.head, self.kv_heads * self.head
        for layer in range(self.layers):
            shapes = {"q": (self.embed, q), "k": (self.embed, kv), "v": (self.embed, kv), "output": (q, self.embed)}
            for name, shape in shapes.items():
                add(f"blk.{layer}.attn_{name}.weight", TensorClass.ATTENTION, layer, *shape)
            for name in ("gate", "up", "down"):
                if self.experts is None:
                    add(f"blk.{layer}.ffn_{name}.weight", TensorClass.DENSE_FFN, layer, self.embed, self.ff)
                else:
                    stack = (self.embed, self.ff, self.experts.count)
                    add(f"blk.{layer}.ffn_{name}_exps.weight", TensorClass.ROUTED_EXPERTS, layer, *stack)
        cache = (LayerCache("full", kv, kv),) * self.layers
        return Profile(
            "shape",
            "catalog",
            "llama",
            tuple(rows),
            (),
            self.layers,
            cache,
            self.experts,
            self.embed,
            self.heads,
            self.kv_heads,
        )


PHI4 = _Shape(40, 5120, 40, 10, 128, 17920, 100352)
QWEN3_14B = _Shape(40, 5120, 40, 8, 128, 17408, 151936)
LLAMA31_8B = _Shape(32, 4096, 32, 8, 128, 14336, 128256)
LLAMA31_70B = _Shape(80, 8192, 64, 8, 128, 28672, 128256)
QWEN3_8B = _Shape(36, 4096, 32, 8, 128, 12288, 151936)
SMOLLM3 = _Shape(36, 2048, 16, 4, 128, 11008, 128256)


_GROUPS = {  # machines that other runs were published of, too
    "threadripper-pro-7965wx": "TRPRO7965WX",
    "xeon-6980p-one-of-two": "Xeon6980P",
    "epyc-9175f-dual": "EPYC9175Fx2",
}


def unseen() -> Iterator[Figure]:
    """All of them."""
    for make in (_epyc_9554, _threadripper, _desktop, _big_epyc, _xeon, _sockets, _cards):
        yield from make()


def _figure(
    case: str,
    value: float | tuple[float, float],
    machine: Machine,
    profile: Profile,
    chosen: Settings,
    placement: Placement,
    depth: int = 64,
) -> Figure:
    low, high = value if isinstance(value, tuple) else (value, value)
    return Figure(
        case,
        _GROUPS.get(machine.name, machine.name),
        "unseen",
        "decode",
        low,
        high,
        machine,
        profile,
        chosen,
        placement,
        depth,
    )


def _cpu(
    name: str,
    model_name: str,
    cores: int,
    gb_s: float,
    mts: int,
    channels: int,
    *,
    l3_mib: int,
    isa: tuple[str, ...],
    kind: str = "DDR5",
    sockets: int = 1,
    gpus: tuple[Gpu, ...] = (),
) -> Machine:
    return Machine(
        name,
        Cpu(model_name, sockets, cores, 2, isa, l3_mib << 20),
        dram=Dram(kind=kind, channels=channels, mts=mts, nominal_gb_s=gb_s),
        gpus=gpus,
    )


def _gpu(name: str, gb_s: float, generation: int = 4) -> Gpu:
    return Gpu(0, name, "nvidia", nominal_gb_s=gb_s, pcie=PcieLink(max_generation=generation, max_width=16))


def _epyc_9554() -> Iterator[Figure]:
    # ahelpme.com/?p=6685: llama-bench, one EPYC 9554 with 12 channels
    machine = find("epyc-9554")
    for kind, value in {"Q4_K": 28.74, "Q5_0": 25.44, "Q6_K": 23.25, "Q8_0": 19.19}.items():
        profile = PHI4.typed(kind, "Q6_K" if kind != "Q8_0" else None)
        yield _figure(f"phi-4 {kind}", value, machine, profile, settings("llama.cpp", 64), on_processors(profile))


def _threadripper() -> Iterator[Figure]:
    # github.com/ikawrakow/ik_llama.cpp/pull/602: processors only
    machine = replace(find("threadripper-pro-7965wx"), gpus=())
    profile = QWEN3_14B.typed("Q4_0")
    for depth, value in {0: 22.57, 2048: 20.13, 4096: 18.57}.items():
        yield _figure(
            "qwen3-14b Q4_0", value, machine, profile, settings("ik_llama", 24), on_processors(profile), depth
        )


def _desktop() -> Iterator[Figure]:
    # github.com/ikawrakow/ik_llama.cpp/pull/518 and /934: Ryzen 7950X; its memory's speed is not stated there
    machine = replace(find("desktop-ddr5-3090"), gpus=())
    llama = LLAMA31_8B.typed("IQ3_S", "Q6_K")
    yield _figure("llama-3.1-8b IQ3_S", 15.54, machine, llama, settings("ik_llama", 16), on_processors(llama))
    yield _figure("llama-3.1-8b IQ3_S", 16.14, machine, llama, settings("llama.cpp", 16), on_processors(llama))
    smol = SMOLLM3.typed("Q4_0", "Q6_K")
    quantized = {"cache_type_k": "q8_0"}
    yield _figure("smollm3 Q4_0", 30.95, machine, smol, settings("ik_llama", 16, **quantized), on_processors(smol))
    yield _figure("smollm3 Q4_0", 24.0, machine, smol, settings("ik_llama", 16, **quantized), on_processors(smol), 8192)
    yield _figure("smollm3 Q4_0", 31.1, machine, smol, settings("llama.cpp", 16, **quantized), on_processors(smol))
    yield _figure(
        "smollm3 Q4_0", 19.4, machine, smol, settings("llama.cpp", 16, **quantized), on_processors(smol), 6144
    )
    # a report by a reader of LocalLLaMA: gpt-oss-120b, all experts on a 14900K; memory not stated, taken as 6000 MT/s
    oss = model("gpt-oss-120b:MXFP4_MOE")
    intel = _cpu(
        "i9-14900K",
        "Intel Core i9-14900K",
        24,
        96.0,
        6000,
        2,
        l3_mib=36,
        isa=(*_AVX2, "avx_vnni"),
        gpus=(_gpu("RTX 4090", 1008),),
    )
    yield _figure("gpt-oss-120b", 25.62, intel, oss, settings("llama.cpp", 8), on_cards(oss, 1), 12700)


def _big_epyc() -> Iterator[Figure]:
    # xlab.tencent.com, 2025-03-16: EPYC 9135, 12 x DDR5-5600, best of its runs
    small = _cpu("epyc-9135", "AMD EPYC 9135", 16, 537.6, 5600, 12, l3_mib=64, isa=_AVX512)
    r1 = model("deepseek-v3:Q8_0")
    yield _figure("deepseek-r1 Q8_0", 7.17, small, r1, settings("llama.cpp-2025", 16), on_processors(r1))
    # github.com/ggml-org/llama.cpp/issues/10981: EPYC 9374F, short answers, before latent attention was folded
    v3 = model("deepseek-v3:Q4_K_S")
    machine = replace(find("epyc-9374f"), gpus=())
    yield _figure("deepseek-v3 Q4_K_S", (6.6, 7.9), machine, v3, settings("llama.cpp-2025", 32), on_processors(v3), 200)


def _xeon() -> Iterator[Figure]:
    # github.com/ikawrakow/ik_llama.cpp/pull/541: one 6980P, processors only
    machine, r1 = find("xeon-6980p-one-of-two"), model("deepseek-v3:Q4_K_M/IQ3_KT")
    yield _figure("deepseek-r1 IQ3_KT", 8.22, machine, r1, settings("ik_llama", 128), on_processors(r1))
    # forum.level1techs.com/t/225826/422: the same machine with llama.cpp
    q8 = model("deepseek-v3:Q8_0")
    yield _figure("deepseek-r1 Q8_0", 6.2, machine, q8, settings("llama.cpp-2025", 64), on_processors(q8))


def _sockets() -> Iterator[Figure]:
    # github.com/ggml-org/llama.cpp/issues/11744: two EPYC 9175F, 16 channels; without and with care
    machine = _cpu("epyc-9175f-dual", "AMD EPYC 9175F", 32, 819.2, 6400, 16, l3_mib=1024, isa=_AVX512, sockets=2)
    llama = LLAMA31_70B.typed("F16")
    yield _figure(
        "llama-3.1-70b F16", (2.4, 4.31), machine, llama, settings("llama.cpp-2025", 32), on_processors(llama)
    )


def _cards() -> Iterator[Figure]:
    # github.com/AlexsJones/llmfit/pull/755 and /773: RTX 2080, i9-10900X with four channels of DDR4
    machine = _cpu(
        "i9-10900X",
        "Intel Core i9-10900X",
        10,
        102.4,
        3200,
        4,
        l3_mib=19,
        isa=_AVX512,
        kind="DDR4",
        gpus=(_gpu("RTX 2080", 448, 3),),
    )
    llama = LLAMA31_8B.typed("Q4_K", "Q6_K")
    yield _figure("llama-3.1-8b Q4_K", 71.9, machine, llama, settings("llama.cpp", 10), all_on_cards(llama))
    # github.com/CambrianTech/continuum/pull/1627: RTX 5090; github.com/AlexsJones/llmfit/pull/1046: RTX 4090, vLLM
    qwen = QWEN3_8B.typed("Q4_K", "Q6_K")
    fast = Machine("5090", gpus=(_gpu("RTX 5090", 1792, 5),))
    yield _figure("qwen3-8b Q4_K", 221.7, fast, qwen, settings("llama.cpp", 8), all_on_cards(qwen))
    plain = QWEN3_8B.typed("BF16")
    card = Machine("4090", gpus=(_gpu("RTX 4090", 1008),))
    yield _figure("qwen3-8b BF16 vLLM", 58.7, card, plain, settings("vllm", 8), all_on_cards(plain))
