"""llama.cpp recognizes ghosts as their models and plans the same memory as tokenmill."""

from pathlib import Path

import pytest

from support import llama
from support.range_server import range_server
from tokenmill.model.read import read
from tokenmill.model.synthetic import generate, ghost
from tokenmill.units import MIB

CONTEXT = 16384
# llama.cpp's description of each (llama_model_desc)
DESCRIPTIONS = {
    "kimi-k2.5:Q4_K_S": "deepseek2 671B Q4_K - Small",
    "kimi-k2.5:Q4_K_M": "deepseek2 671B Q4_K - Medium",
    "kimi-k2.5:Q4_X": "deepseek2 671B Q4_0",
    "deepseek-v3:Q4_K_M": "deepseek2 671B Q4_K - Medium",
    "llama-4-scout:Q6_K": "llama4 17Bx16E (Scout) Q6_K",
    "llama-4-scout:nvfp4": "llama4 17Bx16E (Scout) NVFP4",
    "llama-4-maverick:Q4_K_M": "llama4 17Bx128E (Maverick) Q4_K - Medium",
    "llama-4-maverick:Q8_0": "llama4 17Bx128E (Maverick) Q8_0",
    "qwen3-235b-a22b:Q4_K_M": "qwen3moe 235B.A22B Q4_K - Medium",
    "glm-4.5:Q4_K_M": "glm4moe 355B.A32B Q4_K - Medium",
    "gpt-oss-120b:MXFP4": "gpt-oss 120B MXFP4 MoE",
    "llama-3.3-70b:Q4_K_M": "llama 70B Q4_K - Medium",
    "qwen3-32b:Q4_K_M": "qwen3 32B Q4_K - Medium",
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_llama_cpp_plans_a_ghost_with_our_sizes(name: str, tmp_path: Path) -> None:
    path = tmp_path / "ghost.gguf"
    written = ghost.write(name, path)
    planned = llama.plan(path, context=CONTEXT)
    profile = read(path)
    assert planned.description == DESCRIPTIONS[name]
    assert planned.parameters == written.parameters == profile.parameters
    assert planned.weight_bytes == profile.bytes
    # every layer has the whole context, also those with windows and chunks, as requested from llama.cpp
    cache = sum(layer.bytes_per_token() * CONTEXT for layer in profile.cache)
    assert planned.cache_mib == pytest.approx(cache / MIB, abs=0.01)
    assert "control-looking token" not in planned.log
    assert path.stat().st_blocks * 512 == written.disk_bytes  # nothing touched the hole


def test_the_seeds_cache_comes_out_exactly(tmp_path: Path) -> None:
    path = tmp_path / "kimi.gguf"
    ghost.write("kimi-k2.5:Q4_K_M", path)
    assert [llama.plan(path, context=tokens).cache_mib for tokens in (16384, 32768)] == [1098, 2196]


def test_a_ghost_of_a_real_file_is_planned_like_the_file(tmp_path: Path) -> None:
    model, copy = tmp_path / "model.gguf", tmp_path / "ghost.gguf"
    generate.write("moe-mla", generate.sizes("moe-mla", {}), model)
    ghost.write(str(model), copy)
    real, ghostly = llama.plan(model, context=4096), llama.plan(copy, context=4096)
    assert (real.description, real.parameters, real.weight_bytes, real.cache_mib) == (
        ghostly.description,
        ghostly.parameters,
        ghostly.weight_bytes,
        ghostly.cache_mib,
    )


def test_a_ghost_is_made_from_an_address_without_its_weights(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    generate.write("moe", generate.sizes("moe", {}), tmp_path / "served" / "model.gguf")
    with range_server(tmp_path / "served") as server:
        written = ghost.write(f"{server.url}/model.gguf", tmp_path / "ghost.gguf")
        assert server.bytes_sent < MIB < written.apparent_bytes
    assert llama.plan(tmp_path / "ghost.gguf", context=512).parameters == written.parameters
