"""A real vLLM on this machine's processors, started by our own adapter on a tiny mixture of experts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.tiny_moe import write_tiny_moe
from support.vllm_served import Served, serve

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python of vLLM's own environment."""
    if not (PYTHON.parents[1] / "ready").exists():
        pytest.fail("there is no vLLM here: make test-vllm installs it", pytrace=False)
    return PYTHON


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, vllm_python: Path) -> Path:
    """A folder with the model."""
    return write_tiny_moe(tmp_path_factory.mktemp("model") / "tiny-moe", smollm2_path, vllm_python)


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all tests: an engine belongs to the loop in which it was started."""
    with asyncio.Runner() as running:
        yield running


@pytest.fixture(scope="session")
def served(
    tiny_moe: Path, vllm_python: Path, runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The tiny mixture, served."""
    running = runner.run(serve(tiny_moe, vllm_python, tmp_path_factory.mktemp("state")))
    try:
        yield running
    finally:
        runner.run(running.engine.close())
