"""The index of sparse attention (DSA) in llama.cpp's graphs, which chooses the tokens that a query attends to.

`index_keys` computes and stores the index key of each token, `chosen_mask` scores all cells, keeps the best and removes
the others from the mask. Layers without an index of their own use the choice of the layer before them.
"""

from collections.abc import Mapping

from tokenmill.model.profile import LayerCache, Tensor
from tokenmill.planner.compute_graph.builder import F16, F32, I32, I64, GraphBuilder

INDEX = "indexer.attn_q_b"


def index_keys(graph: GraphBuilder, tensors: Mapping[str, Tensor], normed: int, positions: int) -> None:
    """Compute the index keys and store them in their own cache."""
    size = tensors["indexer.attn_k"].shape[1]
    keys = graph.add("index_k", size, graph.add("index_k", size, normed))
    for _ in ("weight", "bias"):
        keys = graph.add("index_k", size, keys, in_place=True)
    keys = graph.add("index_k", size, graph.view(keys), positions)
    keys = graph.add("index_k", size, _turn(graph, size), keys)
    graph.store(graph.view(keys), _index_cells(graph))


def index_inputs(graph: GraphBuilder, cache: LayerCache) -> None:
    """Add the inputs of a layer's index, if it has one."""
    if cache.indexer_elements:
        _index_cells(graph)
        _turn(graph, cache.indexer_elements)
        _index_mask(graph)


def chosen_mask(
    graph: GraphBuilder,
    tensors: Mapping[str, Tensor],
    cache: LayerCache,
    normed: int,
    queries: int,
    mask: int,
    positions: int,
) -> int:
    """The mask of the cells that the index chooses."""
    chosen = min(cache.indexer_top_k, graph.batch.cells)
    zeros = graph.constant("zeros", chosen * graph.tokens * F32)
    zeros = graph.block("zeros", chosen * graph.tokens * F32, zeros, in_place=True)
    if INDEX in tensors or graph.chosen is None:
        graph.chosen = _choice(graph, tensors, chosen, normed, queries, positions)
    filled = graph.block("filled", graph.steps[mask].bytes, mask)
    opened = graph.view(graph.view(filled))
    graph.hold(zeros, graph.view(graph.chosen), opened)
    return graph.block("chosen_mask", graph.steps[mask].bytes, graph.view(opened), mask, in_place=True)


def _choice(
    graph: GraphBuilder, tensors: Mapping[str, Tensor], chosen: int, normed: int, queries: int, positions: int
) -> int:
    """Score all cells for each token; the cells with the highest scores."""
    width = tensors[INDEX].shape[1]
    size = tensors["indexer.attn_k"].shape[1]
    query = graph.add("index_q", width, queries)
    query = graph.add("index_q", width, graph.view(query), positions)
    query = graph.add("index_q", width, _turn(graph, size), query)
    heads = tensors["indexer.proj"].shape[1]
    weights = graph.add("index_weights", heads, graph.view(graph.add("index_weights", heads, normed)))
    scores = graph.add("index_scores", graph.batch.cells, graph.view(query), weights, _index_mask(graph))
    best = graph.block("best", chosen * graph.tokens * I32, scores)
    return graph.block("best", chosen * graph.tokens * I32, best)


def _index_cells(graph: GraphBuilder) -> int:
    return graph.input("index_cells", graph.batch.tokens * I64)


def _index_mask(graph: GraphBuilder) -> int:
    """The mask of the index, which has 16 bits with and without flash attention."""
    return graph.input("index_mask", graph.batch.cells * graph.batch.tokens * F16)


def _turn(graph: GraphBuilder, size: int) -> int:
    """The Hadamard matrix that rotates queries and keys of the index."""
    return graph.input("index_turn", size * size * F32)
