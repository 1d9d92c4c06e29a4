"""Differences between engines in memory use: one row per engine version. Estimates are marked as such."""

from dataclasses import dataclass

from tokenmill.planner.compute_graph.ik_options import IK_2025, IK_FIRST_FIT, IK_SPRING_2026, IkOptions
from tokenmill.planner.goal import DialectName
from tokenmill.units import GIB, MIB


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Memory use of one engine version."""

    stores_latent_v: bool = False  # stores V of a latent cache separately from K
    graph_of_2025: bool = False  # creates the mask in 32 bits, reserves no input for embeddings
    offload_rows: int | None = 32  # batch size from which host weights are copied to the GPU and computed there
    repacks: bool = True  # copies host weights into the layout of its kernels
    runtime_bytes: int = 512 * MIB  # driver context, kernels and workspaces on an unmeasured GPU: estimated
    process_bytes: int = GIB  # the server, its vocabulary and HTTP buffers: estimated
    ik: IkOptions | None = None  # ik_llama.cpp's options in that version
    loads_mtp: bool = False  # loads multi-token prediction layers, although ordinary decoding does not use them


TRAITS: dict[DialectName, EngineTraits] = {
    "llama.cpp": EngineTraits(),
    "llama.cpp-2025": EngineTraits(stores_latent_v=True, graph_of_2025=True, loads_mtp=True),
    "ik_llama": EngineTraits(repacks=False, loads_mtp=True, ik=IkOptions()),
    "ik_llama-2026-04": EngineTraits(repacks=False, loads_mtp=True, ik=IK_SPRING_2026),
    "ik_llama-2026-03": EngineTraits(repacks=False, loads_mtp=True, ik=IK_FIRST_FIT),
    "ik_llama-2025": EngineTraits(repacks=False, loads_mtp=True, ik=IK_2025),
    "vllm": EngineTraits(offload_rows=None, repacks=False),
}
