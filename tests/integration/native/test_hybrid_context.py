"""Forks of sequences with a recurrent state, in real contexts of models in which recurrent and attention layers mix."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.hybrid_models import delta_net, kda, mamba
from support.native import Work, opened
from support.odd_models import VOCAB, recurrent
from tokenmill.errors import EngineError
from tokenmill.native.llama.context import Decoded, LlamaContext, Logits
from tokenmill.native.llama.settings import ContextSettings

SMALL = ContextSettings(cells=512, context=512, sequences=6, batch=256, ubatch=128, threads=1, threads_batch=1)
IDENTITY = {"model": "m1"}
MODELS = (delta_net, mamba, kda, recurrent)


@pytest.fixture(params=MODELS, ids=lambda make: make.__name__)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make: Callable[[Path], Path] = request.param
    return make(tmp_path / "model.gguf")


@pytest.fixture
def context(path: Path) -> Iterator[LlamaContext]:
    with opened(path, SMALL) as made:
        yield made


def words(count: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, VOCAB, count).tolist()
    return found


def fresh(context: LlamaContext, tokens: list[int]) -> Logits:
    """Logits after tokens computed alone, from nothing."""
    context.clear()
    assert context.decode([Work(0, tokens, 0)]) is Decoded.OK
    found = context.logits(len(tokens) - 1).copy()
    context.clear()
    return found


def same(found: Logits, wanted: Logits) -> bool:
    return bool(np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max())


def test_a_state_is_forked_any_number_of_times_and_stays(context: LlamaContext) -> None:
    assert context.can_share() == (True, None)
    head, tails = words(70, 1), [words(9, 2), words(4, 3), words(9, 4)]
    wanted = [fresh(context, head + tail) for tail in tails]
    assert not same(wanted[0], wanted[1])
    context.decode([Work(0, head, 0, False)])
    for target in (1, 2, 3):
        context.copy(0, target, 70)
    context.decode([Work(target, tail, 70) for target, tail in zip((1, 2, 3), tails, strict=True)])
    places = np.cumsum([len(tail) for tail in tails]) - 1
    for place, want in zip(places.tolist(), wanted, strict=True):
        assert same(context.logits(place), want)
    context.cut(2, 0)
    context.copy(0, 2, 70)  # the state of the first sequence is still that of the prefix
    context.decode([Work(2, tails[0], 70)])
    assert same(context.logits(8), wanted[0])


def test_a_sequence_is_cut_only_as_a_whole(context: LlamaContext) -> None:
    context.decode([Work(0, words(20, 1), 0, False)])
    assert not context.cut(0, 5)
    assert context.length(0) == 20
    assert context.cut(0, 0)
    assert context.length(0) == 0


def test_a_saved_state_comes_back_in_another_context(path: Path, tmp_path: Path) -> None:
    head, tail, file = words(50, 1), words(4, 2), tmp_path / "digest.head"
    with opened(path, SMALL) as context:
        want = fresh(context, head + tail)
        context.decode([Work(0, head, 0, False)])
        context.copy(0, 4, 50)
        context.decode([Work(4, tail, 50, False)])
        with pytest.raises(EngineError):
            context.save_sequence(4, file, head, IDENTITY)  # its state is that after the tail
        assert context.save_sequence(0, file, head, IDENTITY) == file.stat().st_size
    with opened(path, replace(SMALL, cells=256, context=256, sequences=3)) as other:
        other.decode([Work(0, words(11, 7), 0, False)])
        assert other.restore_sequence(2, file, IDENTITY) == tuple(head)
        other.copy(2, 1, 50)
        other.decode([Work(1, tail, 50)])
        assert same(other.logits(3), want)
