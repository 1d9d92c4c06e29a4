"""How engines differ in what they allocate. One row per dialect; a figure that is not from its source says so."""

from dataclasses import dataclass

from tokenmill.planner.compute_graph.ik_options import IK_2025, IK_FIRST_FIT, IK_SPRING_2026, IkOptions
from tokenmill.planner.goal import DialectName
from tokenmill.units import GIB, MIB


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What one dialect does with memory."""

    stores_latent_v: bool = False  # keeps V of a latent cache apart from K
    graph_of_2025: bool = False  # the mask comes in 32 bits, and there is no room for ready-made embeddings
    offload_rows: int | None = 32  # rows from which a product with host weights moves to the GPU, weights and all
    repacks: bool = True  # copies host weights into a layout for its kernels
    runtime_bytes: int = 512 * MIB  # driver context, kernels and workspaces on a GPU that nobody measured: estimated
    process_bytes: int = GIB  # the server itself, its vocabulary and HTTP buffers: estimated
    ik: IkOptions | None = None  # ik_llama.cpp's switches as that version has them
    loads_mtp: bool = False  # reads multi-token-prediction layers although ordinary decoding does not use them


TRAITS: dict[DialectName, EngineTraits] = {
    "llama.cpp": EngineTraits(),
    "llama.cpp-2025": EngineTraits(stores_latent_v=True, graph_of_2025=True, loads_mtp=True),
    "ik_llama": EngineTraits(repacks=False, loads_mtp=True, ik=IkOptions()),
    "ik_llama-2026-04": EngineTraits(repacks=False, loads_mtp=True, ik=IK_SPRING_2026),
    "ik_llama-2026-03": EngineTraits(repacks=False, loads_mtp=True, ik=IK_FIRST_FIT),
    "ik_llama-2025": EngineTraits(repacks=False, loads_mtp=True, ik=IK_2025),
    "vllm": EngineTraits(offload_rows=None, repacks=False),
}
