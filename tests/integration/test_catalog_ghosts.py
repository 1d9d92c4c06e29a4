"""llama.cpp loads the header of every catalogue model: it finds each tensor with its shape, and the same sizes."""

from pathlib import Path

import pytest

from support.dry_runs import projected
from tokenmill.model import catalog
from tokenmill.model.profile import TensorClass
from tokenmill.model.read import read
from tokenmill.model.synthetic import ghost
from tokenmill.native.llama.dry_run import ContextProjection, DryRun
from tokenmill.planner.memory.kv_cells import KvContext, kv_bytes

CONTEXT = KvContext(4096)


def one_per_shape() -> list[str]:
    """`model:quant` for one model of each shape; those with equal tensors would be loaded in the same way."""
    found: dict[str, str] = {}
    for name in catalog.names():
        entry = catalog.entry(name)
        found.setdefault(repr((entry.model.architecture, entry.model.slots())), f"{name}:{entry.listed[0]}")
    return sorted(found.values())


MODELS = one_per_shape()


@pytest.fixture(scope="module")
def projections(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, ContextProjection]]:
    folder = tmp_path_factory.mktemp("ghosts")
    paths = {name: folder / f"{number}.gguf" for number, name in enumerate(MODELS)}
    for name, path in paths.items():
        ghost.write(name, path)
    found = projected([(path, DryRun((CONTEXT,))) for path in paths.values()])
    return {name: (path, seen[0]) for (name, path), seen in zip(paths.items(), found, strict=True)}


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_finds_every_tensor(name: str, projections: dict[str, tuple[Path, ContextProjection]]) -> None:
    path, found = projections[name]
    profile = read(path)
    loaded = profile.bytes - sum(tensor.bytes for tensor in profile.of(TensorClass.MTP))
    assert sum(buffer.model_bytes for buffer in found.buffers) == pytest.approx(loaded, rel=1e-6)
    assert sum(buffer.context_bytes for buffer in found.buffers) == sum(kv_bytes(profile, CONTEXT))
    assert profile.guesses == ()
