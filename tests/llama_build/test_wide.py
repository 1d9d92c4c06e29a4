"""A real build of llama.cpp: `make test-build`, which sets TOKENMILL_TEST_BUILD to its folder."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from support.native import Work, opened
from tokenmill.config import Config, EngineConfig
from tokenmill.model.synthetic import generate
from tokenmill.native.builds import finished
from tokenmill.native.builds.finished import Build
from tokenmill.native.builds.verify import verify
from tokenmill.native.llama.context import Decoded, most_sequences
from tokenmill.native.llama.settings import ContextSettings

SEQUENCES = 1000


@pytest.fixture(scope="module")
def build() -> Build:
    found = finished.read(Path(os.environ["TOKENMILL_TEST_BUILD"]))
    assert found is not None
    return found


def test_the_library_has_the_limit_that_was_asked_for(build: Build) -> None:
    found = verify(build.library, build.header, max_sequences=build.max_sequences)
    assert found.max_sequences == build.max_sequences > SEQUENCES
    assert "CPU" in found.devices


def test_the_native_engine_uses_it(build: Build) -> None:
    used = finished.with_build(EngineConfig(), Config().engines_path)
    assert finished.build_of(used) is not None
    assert Path(used.library or "").resolve() == build.library.resolve()
    assert finished.max_sequences(used) == build.max_sequences


def test_the_server_runs(build: Build) -> None:
    done = subprocess.run([build.server, "--version"], capture_output=True, text=True, check=True)
    assert "11549" in done.stdout + done.stderr


@pytest.mark.parametrize("streams", [False, True])
def test_many_sequences_are_decoded_in_one_step(tmp_path: Path, *, streams: bool) -> None:
    path = tmp_path / "moe.gguf"
    generate.write(
        "moe", generate.sizes("moe", {"layers": 2, "embed": 128, "vocab": 600, "heads": 4, "head_dim": 32}), path
    )
    settings = ContextSettings(
        cells=256 * SEQUENCES if streams else 4 * SEQUENCES,
        context=256,
        sequences=SEQUENCES,
        ubatch=1024,
        batch=1024,
        threads=2,
        threads_batch=2,
        streams=streams,
    )
    with opened(path, settings) as context:
        assert most_sequences(context.model) > SEQUENCES
        for position, token in enumerate((504, 100, 253)):
            rows = [Work(sequence, [token + sequence % 2], position) for sequence in range(SEQUENCES)]
            assert context.decode(rows) is Decoded.OK
            logits = [context.logits(row).copy() for row in range(SEQUENCES)]
            for row in logits:
                assert np.isfinite(row).all()
            # Even and odd sequences have different tokens, so each pair must agree and the two groups must not.
            assert np.abs(logits[0] - logits[-2]).max() < 0.02 * np.abs(logits[0]).max()
            assert np.abs(logits[1] - logits[-1]).max() < 0.02 * np.abs(logits[1]).max()
            assert np.abs(logits[0] - logits[1]).max() > 0.02 * np.abs(logits[0]).max()
