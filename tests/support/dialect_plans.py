"""Handmade plans and models for tests of command lines: small sizes, real structure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from tokenmill.hardware.machine import Cpu, Gpu, Machine, NumaNode
from tokenmill.model.profile import Experts, LayerCache, ModelFile, Profile, Tensor, TensorClass
from tokenmill.planner.goal import Goal
from tokenmill.planner.plan import Forecast, Ledger, LedgerRow, Placement, Plan, Settings
from tokenmill.units import GIB

EXPERT_NAMES = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
LAYER_NAMES = (
    "attn_norm.weight",
    "attn_q.weight",
    "attn_k.weight",
    "attn_k.bias",
    "ffn_gate_inp.weight",
    "ffn_up_shexp.weight",
    "exp_probs_b.bias",
)


def tensor(name: str, cls: TensorClass, layer: int | None, size: int = 1000) -> Tensor:
    shape = (8, 8, 4) if cls is TensorClass.ROUTED_EXPERTS else (8, 8)
    return Tensor(name, cls, layer, shape, "Q4_K", size, 2 * size)


def small_profile(layers: int, *, dense: int = 1, mtp: int = 0, latent: bool = False) -> Profile:
    """A mixture of experts: `dense` layers without experts first, `mtp` prediction layers last."""
    rows = [tensor("token_embd.weight", TensorClass.EMBEDDING, None)]
    for layer in range(layers + mtp):
        cls = TensorClass.MTP if layer >= layers else None
        rows += [tensor(f"blk.{layer}.{name}", cls or TensorClass.ATTENTION, layer) for name in LAYER_NAMES]
        if layer >= dense:
            rows += [
                tensor(f"blk.{layer}.{name}", cls or TensorClass.ROUTED_EXPERTS, layer, 50_000) for name in EXPERT_NAMES
            ]
    rows += [tensor("output_norm.weight", TensorClass.NORM, None), tensor("output.weight", TensorClass.OUTPUT, None)]
    cache = LayerCache("latent" if latent else "full", 64, 64)
    return Profile(
        "Small Mixture",
        "gguf",
        "test",
        tuple(rows),
        (ModelFile("m.gguf", 1),),
        layers,
        (cache,) * layers,
        experts=Experts(4, 2, 1),
        quantisation="Q4_K_S",
        training_context=32768,
    )


def placed(profile: Profile, layers: Sequence[str], head: str, resident: Iterable[int] = ()) -> Placement:
    """A placement with the experts of `resident` layers on the GPU of their layer, all others on the host."""
    kept = set(resident)

    def home(row: Tensor) -> str:
        if row.cls is TensorClass.EMBEDDING or (row.layer is not None and row.layer >= len(layers)):
            return "dram"
        if row.layer is None:
            return head
        on_host = row.cls is TensorClass.ROUTED_EXPERTS and row.layer not in kept
        return "dram" if on_host else layers[row.layer]

    return Placement(tuple(map(home, profile.tensors)), tuple(layers), head)


def machine_with(gpus: int = 0, *, cores: int = 16, threads_per_core: int = 1, nodes: int = 1) -> Machine:
    per_node = cores // nodes
    numa = tuple(
        NumaNode(
            index,
            tuple(
                cpu + sibling * cores
                for sibling in range(threads_per_core)
                for cpu in range(index * per_node, (index + 1) * per_node)
            ),
            256 * GIB,
        )
        for index in range(nodes)
    )
    cards = tuple(Gpu(index, "RTX 3090", "nvidia", 24 * GIB) for index in range(gpus))
    return Machine("test-box", Cpu(cores=cores, threads_per_core=threads_per_core, sockets=nodes), numa, gpus=cards)


def plan_of(
    profile: Profile,
    placement: Placement,
    machine: Machine,
    *,
    host_gib: int = 100,
    goal: Goal | None = None,
    **settings: Any,
) -> Plan:
    goal = goal or Goal()
    wanted = Settings(
        engine=goal.engine,
        context=8192,
        sequences=1,
        ubatch=512,
        batch=2048,
        cache_type_k="f16",
        cache_type_v="f16",
        threads=8,
        threads_batch=8,
        flash_attention=True,
        mmap=True,
        mlock=False,
        repack=False,
        cache_ram_bytes=0,
    )
    rows = (LedgerRow("dram", "weights", host_gib * GIB), LedgerRow("dram", "reserve", 32 * GIB))
    return Plan(
        machine,
        profile,
        goal,
        replace(wanted, **settings),
        placement,
        Ledger(rows, rows, rows),
        Forecast((), (), None, None, None),
        (),
    )
