"""Compute buffers against measurements on a GPU, with and without experts on the host."""

from dataclasses import replace

import pytest

from tokenmill.model import catalog
from tokenmill.model.describe import describe
from tokenmill.model.profile import LayerCache, Profile, Tensor, TensorClass
from tokenmill.planner.compute_graph.allocator import buffer_bytes
from tokenmill.planner.compute_graph.builder import MicroBatch
from tokenmill.planner.compute_graph.llama_cpp import build_graph, undrawn
from tokenmill.units import MIB


def kimi_slice() -> Profile:
    """The measured slice of Kimi: one dense layer and four with Q4_0 experts."""
    whole = describe((catalog.header("kimi-k2.5:Q4_X"),), format="catalog")
    kept = tuple(tensor for tensor in whole.tensors if tensor.layer is None or tensor.layer < 5)
    return replace(whole, layers=5, cache=whole.cache[:5], tensors=kept)


# MiB reported by llama.cpp b11549 on an H200, -ub 512, flash attention on: context, all on the GPU, experts on the
# CPU, the host's own.
MEASURED = [(8192, 384, 3232, 64), (32768, 408, 3256, 88), (131072, 504, 3352, 184)]


@pytest.mark.parametrize(("context", "resident", "staged", "host"), MEASURED)
def test_the_buffers_of_an_h200(context: int, resident: int, staged: int, host: int) -> None:
    model, batch = kimi_slice(), MicroBatch(512, context)
    graphs = (
        build_graph(model, batch, embed=False),
        build_graph(model, batch, embed=False, staged=range(5)),
        build_graph(model, batch, layers=(), head=False),
    )
    assert [buffer_bytes(graph.steps) // MIB for graph in graphs] == [resident, staged, host]


def test_a_second_gpu_gets_only_the_hidden_state() -> None:
    model, batch = kimi_slice(), MicroBatch(512, 8192)
    first = build_graph(model, batch, range(3), embed=False, head=False)
    second = build_graph(model, batch, range(3, 5), embed=False)
    assert list(first.inputs) == ["mixed_embd", "rows", "mixed_slots", "hidden", "positions", "k_cells", "mask"]
    assert list(second.inputs) == ["hidden", "positions", "k_cells", "mask", "outputs"]


def test_a_pipeline_keeps_four_of_every_input() -> None:
    model = kimi_slice()
    one, four = (
        buffer_bytes(build_graph(model, MicroBatch(512, 131072, copies=copies), range(3, 5), embed=False).steps)
        for copies in (1, 4)
    )
    assert four - one >= 3 * 131072 * 512 * 2  # three more masks


def test_few_outputs_save_the_logits() -> None:
    model = kimi_slice()
    all_of_them, one = (
        buffer_bytes(build_graph(model, MicroBatch(512, 8192, outputs=count)).steps) for count in (None, 1)
    )
    assert all_of_them - one > 100 * MIB


def odd(tensors: dict[str, tuple[int, ...]], cache: LayerCache) -> Profile:
    return Profile(
        name="odd",
        format="gguf",
        architecture="odd",
        files=(),
        layers=1,
        cache=(cache,),
        embedding_length=64,
        heads=4,
        tensors=tuple(
            Tensor(f"blk.0.{name}.weight", TensorClass.ATTENTION, 0, shape, "F16", 2, 1)
            for name, shape in tensors.items()
        ),
    )


@pytest.mark.parametrize(
    ("tensors", "cache"),
    [
        (
            {"attn_qkv": (64, 192), "attn_output": (64, 64), "ffn_up": (64, 512), "ffn_down": (256, 64)},
            LayerCache("full", 64, 64),
        ),
        ({"ssm_in": (64, 512), "ssm_out": (256, 64)}, LayerCache("recurrent", state_bytes=9)),
        ({"ffn_up": (64, 256), "ffn_down": (256, 64)}, LayerCache("none")),
        (
            {"ffn_gate_inp": (64, 8), "ffn_gate_up_exps": (64, 512, 8), "ffn_down_exps": (256, 64, 8)},
            LayerCache("none"),
        ),
        ({"something_new": (64, 64)}, LayerCache("full", 64, 64)),
    ],
)
def test_unlisted_architectures_get_a_graph(tensors: dict[str, tuple[int, ...]], cache: LayerCache) -> None:
    size = buffer_bytes(build_graph(odd(tensors, cache), MicroBatch(32, 256)).steps)
    assert size >= 32 * 4 * max(shape[1] for name, shape in tensors.items() if len(shape) == 2 and name != "ffn_up")


def test_layers_that_are_only_approximated_are_known() -> None:
    exact, approximate = (
        describe((catalog.header(name, words=False),), format="catalog")
        for name in ("qwen3.5-35b-a3b:Q4_K_M", "deepseek-v4-flash:MXFP4")
    )
    assert (undrawn(exact), undrawn(approximate)) == (False, True)
    assert buffer_bytes(build_graph(approximate, MicroBatch(32, 256)).steps) > 0
