"""What crosses the network between hosts in one step, and how long that takes.

llama.cpp's RPC backend (ggml-rpc.cpp, protocol 8.0), for every worker that has layers:

  head  --> worker   state of every token (4 bytes x embedding; two of them where processors computed the layer before,
                     whose last sum is left to the worker), mask, positions, cell numbers; then the graph, or 12 bytes
                     that say "the same again"
  head  <-- worker   the state after its layers: asked for, so one round trip

Workers never talk to each other: from one to the next the state passes through the head. vLLM sends state and
residual (2 bytes each) from stage to stage, and sums two partial results in every layer over all GPUs of a stage.
"""

from tokenmill.hardware.fleet import Link
from tokenmill.model.profile import Profile, TensorClass
from tokenmill.planner.kv_cells import PAD
from tokenmill.planner.plan import Term

STATE_BYTES = 4  # llama.cpp's activations are F32
TENSOR_BYTES = 296  # one tensor's description on the wire (rpc_tensor)
# Tensors of one layer's graph, nodes and what they read: counted for a dense model, inferred from the bytes on the wire
# for one mixture with a latent cache.
DENSE_TENSORS = 43
MIXTURE_TENSORS = 90
STEP_MESSAGES = 7  # inputs that are set, graph, result: each with a description and its sizes
MESSAGE_BYTES = TENSOR_BYTES + 32
GRAPH_TOKENS = PAD  # decoding sends the graph again when the cache grows by another page
INSIDE_TRIPS = 3  # round trips of a state between two devices of one worker: refused copy, fetched, set
INSIDE_MESSAGES = 4  # and the graph behind it
MESSAGE_S = 60e-6  # one message on both ends, without the network: amid 45 to 115 on a busy guest, see docs/hosts.md
HALF_BYTES = 2  # vLLM's activations
GIGA = 1e9


def graph_tensors(part: Profile) -> int:
    """Tensors of the graph that a worker gets for its part of a model."""
    mixed = {tensor.layer for tensor in part.of(TensorClass.ROUTED_EXPERTS)}
    return len(mixed) * MIXTURE_TENSORS + (part.layers - len(mixed)) * DENSE_TENSORS


def rpc_terms(
    link: Link,
    *,
    embedding: int,
    graph: int,
    tokens: int,
    cells: int,
    mask_bytes: int,
    prefill: bool,
    takes: int = 1,
    inside: int = 0,
) -> list[Term]:
    """What one worker adds to a step of `tokens` tokens that look at `cells` cells.

    `graph`: tensors of its graph; `takes`: states that it is sent for a token; `inside`: how often one passes between
    that worker's own devices.
    """
    padded = -(-cells // PAD) * PAD
    mask = tokens * padded * mask_bytes
    described = graph * TENSOR_BYTES / (1 if prefill else GRAPH_TOKENS)
    state = (takes + 1.0) * tokens * embedding * STATE_BYTES + STEP_MESSAGES * MESSAGE_BYTES
    copies = inside * 2.0 * tokens * embedding * STATE_BYTES
    found = [
        _term("link states", state + copies, link),
        _term("link masks", mask, link),
        _term("link graphs", described, link),
        Term("link round trips", (1 + inside * INSIDE_TRIPS) * link.round_trip_s),
        Term("link messages", (STEP_MESSAGES + inside * INSIDE_MESSAGES) * MESSAGE_S),
    ]
    return [term for term in found if term.seconds > 0]


def stage_terms(link: Link, *, embedding: int, tokens: int) -> list[Term]:
    """vLLM: from one pipeline stage to the next."""
    return [
        _term("link states", 2.0 * tokens * embedding * HALF_BYTES, link),
        Term("link round trips", link.one_way_s),
    ]


def reduce_terms(link: Link, *, embedding: int, layers: int, tokens: int, hosts: int) -> list[Term]:
    """vLLM: two sums in every layer, and one of the embedding, round a ring of `hosts` hosts."""
    if hosts < 2:
        return []
    sums = 2 * layers + 1
    count = sums * 2.0 * (hosts - 1) / hosts * tokens * embedding * HALF_BYTES
    return [
        _term("link sums", count, link),
        Term("link round trips", sums * 2 * (hosts - 1) * link.one_way_s),
    ]


def _term(name: str, count: float, link: Link) -> Term:
    return Term(name, count / link.gb_s / GIGA, count, link.gb_s)
