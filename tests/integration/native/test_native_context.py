"""Cells, batches, aborts and saved prefixes of real contexts."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.native import Work, loaded, opened
from support.odd_models import VOCAB, windowed
from tokenmill.errors import EngineError, ForeignState
from tokenmill.model.synthetic import generate
from tokenmill.native.llama.context import Decoded, LlamaContext, Logits
from tokenmill.native.llama.model import LlamaModel
from tokenmill.native.llama.settings import ContextSettings

SMALL = ContextSettings(cells=512, context=512, sequences=6, batch=256, ubatch=128, threads=1, threads_batch=1)
IDENTITY = {"model": "m1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    path = tmp_path_factory.mktemp("models") / "moe.gguf"
    generate.write(
        "moe", generate.sizes("moe", {"layers": 2, "embed": 128, "vocab": 608, "heads": 4, "head_dim": 32}), path
    )
    with loaded(path) as made:
        yield made


@pytest.fixture
def context(model: LlamaModel) -> Iterator[LlamaContext]:
    made = LlamaContext(model, SMALL)
    yield made
    made.close()


def words(count: int, seed: int = 0, most: int = VOCAB) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, most, count).tolist()
    return found


def fresh(context: LlamaContext, tokens: list[int]) -> Logits:
    """Logits after tokens computed alone, from nothing."""
    context.clear()
    for start in range(0, len(tokens), context.batch):
        part = tokens[start : start + context.batch]
        assert context.decode([Work(0, part, start)]) is Decoded.OK
    found = context.logits(len(part) - 1).copy()
    context.clear()
    return found


def same(found: Logits, wanted: Logits) -> bool:
    return bool(np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max())


def test_rows_of_one_batch_do_not_see_each_other(context: LlamaContext) -> None:
    prompts = [words(7, 1), words(31, 2), words(1, 3)]
    wanted = [fresh(context, prompt) for prompt in prompts]
    assert context.decode([Work(number, prompt, 0) for number, prompt in enumerate(prompts)]) is Decoded.OK
    places = np.cumsum([len(prompt) for prompt in prompts]) - 1
    for place, want in zip(places.tolist(), wanted, strict=True):
        assert same(context.logits(place), want)
    assert not same(wanted[0], wanted[1])


def test_a_shared_prefix_takes_no_cells_and_gives_the_same(context: LlamaContext) -> None:
    head, tails = words(300, 1), [words(5, seed) for seed in (2, 3, 4)]
    wanted = [fresh(context, head + tail) for tail in tails]
    assert context.decode([Work(0, head[:250], 0, False)]) is Decoded.OK
    assert context.decode([Work(0, head[250:], 250, False)]) is Decoded.OK
    for number in (1, 2, 3):
        context.copy(0, number, len(head))
    context.cut(0, 0)
    assert context.length(0) == 0
    assert context.decode([Work(1 + at, tail, len(head)) for at, tail in enumerate(tails)]) is Decoded.OK
    for at, want in enumerate(wanted):
        assert same(context.logits(5 * at + 4), want)
    # 300 + 15 of 512 cells are used: the prefix would not fit three times
    assert context.decode([Work(4, words(197, 9), 0, False)]) is Decoded.OK
    assert context.decode([Work(5, [3], 0)]) is Decoded.NO_ROOM


def test_a_cut_sequence_goes_on_from_there(context: LlamaContext) -> None:
    first, second = words(40, 1), words(10, 2)
    want = fresh(context, first[:25] + second)
    context.decode([Work(2, first, 0, False)])
    assert context.cut(2, 25)
    assert context.length(2) == 25
    context.decode([Work(2, second, 25)])
    assert same(context.logits(9), want)


def test_no_room_computes_nothing(context: LlamaContext) -> None:
    context.decode([Work(0, words(250), 0, False)])
    context.decode([Work(1, words(200), 0, False)])
    assert context.decode([Work(2, words(63), 0), Work(0, [5], 250)]) is Decoded.NO_ROOM
    assert [context.length(number) for number in (0, 1, 2)] == [250, 200, 0]
    for place in (62, 63):
        with pytest.raises(EngineError, match="no logits of place"):
            context.logits(place)
    context.cut(1, 0)
    assert context.decode([Work(2, words(63), 0), Work(0, [5], 250)]) is Decoded.OK


def test_the_probe_tries_it(context: LlamaContext) -> None:
    assert context.can_share() == (True, None)
    assert [context.length(number) for number in range(SMALL.sequences)] == [0] * SMALL.sequences


def test_logits_that_were_not_requested(context: LlamaContext) -> None:
    context.decode([Work(0, [5, 6], 0)])
    assert context.logits(1).shape == (context.model.vocab.n_tokens,)
    for place in (0, 2, -1):
        with pytest.raises(EngineError, match="no logits of place"):
            context.logits(place)


def test_a_batch_that_llama_cpp_refuses_says_why(context: LlamaContext) -> None:
    context.decode([Work(0, [5, 6], 0)])
    with pytest.raises(EngineError, match="inconsistent sequence positions"):
        context.decode([Work(0, [5], 7)])
    with pytest.raises(EngineError, match="invalid token"):
        context.decode([Work(1, [10**6], 0)])
    assert context.decode([Work(0, [5], 2)]) is Decoded.OK


def test_aborted_from_another_thread(model: LlamaModel) -> None:
    context = LlamaContext(model, replace(SMALL, cells=16384, batch=16384, ubatch=64, threads=1, threads_batch=1))
    context.decode([Work(1, words(10), 0, False)])
    timer = threading.Timer(0.05, context.abort)
    timer.start()
    assert context.decode([Work(0, words(16000), 0), Work(1, [5], 10)]) is Decoded.ABORTED
    timer.join()
    assert [context.length(0), context.length(1), context.lost] == [0, 10, ()]
    assert context.decode([Work(0, words(20), 0), Work(1, [5], 10)]) is Decoded.OK  # the flag is down again
    context.close()


def test_threads_change_between_batches(context: LlamaContext) -> None:
    want = fresh(context, words(20))
    context.set_threads(2, 2)
    assert same(fresh(context, words(20)), want)


def test_buffers_by_device(context: LlamaContext) -> None:
    buffers = context.buffers()
    cache = 2 * 2 * 512 * 2 * 32 * 2  # layers x K and V x cells x heads x elements x bytes
    assert sum(buffer.context_bytes for buffer in buffers) == cache
    assert sum(buffer.model_bytes for buffer in buffers) >= context.model.facts.bytes
    assert any(buffer.compute_bytes for buffer in buffers)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (replace(SMALL, sequences=0), "0 sequences"),
        (replace(SMALL, cache_type_k="q6_0"), "no cache type q6_0"),
        (replace(SMALL, cache_type_v="q8_0", flash_attention=False), "quantized V cache"),
    ],
)
def test_contexts_that_cannot_be(model: LlamaModel, settings: ContextSettings, told: str) -> None:
    with pytest.raises(EngineError, match=told):
        LlamaContext(model, settings)


def test_more_sequences_than_the_library_allows(model: LlamaModel) -> None:
    most = model.library.max_sequences
    with pytest.raises(EngineError, match=f"{most} sequences"):
        LlamaContext(model, replace(SMALL, sequences=most))


def test_logits_take_a_row_for_each_id_and_not_for_each_token(model: LlamaModel) -> None:
    def compute(sequences: int) -> int:
        context = LlamaContext(model, replace(SMALL, sequences=sequences))
        found = sum(buffer.compute_bytes for buffer in context.buffers())
        context.close()
        return found

    few, many = compute(7), compute(127)
    row = 4 * model.vocab.n_tokens
    assert 0 < many - few < 121 * row + 4096
    assert few < SMALL.ubatch * row + 2_000_000


# ---- sliding attention


def test_a_prefix_keeps_cells_that_slid_out_of_its_window(tmp_path: Path) -> None:
    """The cells before a kept prefix become free and a longer prompt comes: it must not use the prefix's cells."""
    with opened(windowed(tmp_path / "odd.gguf"), replace(SMALL, sequences=3)) as context:
        assert context.can_share() == (True, None)
        head, tail, parts = words(200, 1), words(3, 2), (40, 100, 200)
        wanted = [fresh(context, head[:part] + tail) for part in parts]
        context.decode([Work(1, words(50, 3), 0, False)])
        context.decode([Work(0, head, 0, False)])
        context.cut(1, 0)
        context.decode([Work(1, words(100, 4), 0, False)])
        for part, want in zip(parts, wanted, strict=True):
            context.copy(0, 2, part)
            assert context.decode([Work(2, tail, part)]) is Decoded.OK
            assert same(context.logits(2), want)
            context.cut(2, 0)


def test_a_window_is_restored_or_not_saved(tmp_path: Path) -> None:
    with opened(windowed(tmp_path / "w.gguf"), SMALL) as context:
        head, tail = words(30, 1), words(4, 2)
        wanted = [fresh(context, head[:part] + tail) for part in (12, 30)]
        context.decode([Work(0, words(60, 5), 0, False)])
        with pytest.raises(EngineError, match="32 tokens"):
            context.save_sequence(0, tmp_path / "long.head", words(60, 5), IDENTITY)
        context.decode([Work(1, head, 0, False)])
        context.save_sequence(1, tmp_path / "short.head", head, IDENTITY)
        context.clear()
        assert context.restore_sequence(3, tmp_path / "short.head", IDENTITY) == tuple(head)
        for part, want in zip((12, 30), wanted, strict=True):
            context.copy(3, 2, part)
            context.decode([Work(2, tail, part)])
            assert same(context.logits(3), want)
            context.cut(2, 0)


# ---- saved prefixes


def test_a_saved_prefix_comes_back_in_another_context(model: LlamaModel, tmp_path: Path) -> None:
    head, tail, path = words(150, 1), words(4, 2), tmp_path / "digest.head"
    context = LlamaContext(model, SMALL)
    want = fresh(context, head + tail)
    short = fresh(context, head[:70] + tail)
    context.decode([Work(0, head, 0, False)])
    context.copy(0, 4, 150)
    context.decode([Work(4, words(20, 3), 150, False)])  # the saved prefix is the beginning of a longer sequence
    size = context.save_sequence(4, path, head, IDENTITY)
    assert size == path.stat().st_size
    context.close()

    other = LlamaContext(model, replace(SMALL, cells=768, sequences=3, threads=1))
    other.decode([Work(0, words(11, 7), 0, False)])
    assert other.restore_sequence(2, path, IDENTITY) == tuple(head)
    assert other.length(2) == 150
    other.copy(2, 1, 150)
    other.decode([Work(1, tail, 150)])
    assert same(other.logits(3), want)
    other.cut(1, 0)
    other.copy(2, 1, 70)
    other.decode([Work(1, tail, 70)])
    assert same(other.logits(3), short)
    other.close()


def test_a_prefix_is_only_restored_where_it_belongs(model: LlamaModel, tmp_path: Path) -> None:
    path = tmp_path / "x.head"
    context = LlamaContext(model, SMALL)
    context.decode([Work(0, words(50), 0, False)])
    context.save_sequence(0, path, words(50), IDENTITY)
    with pytest.raises(EngineError, match="51 tokens"):
        context.save_sequence(0, path, words(51), IDENTITY)
    with pytest.raises(ForeignState, match="model 'm1'.*'m2'"):
        context.restore_sequence(1, path, {"model": "m2"})
    context.close()
    for settings, told in (
        (replace(SMALL, cache_type_k="q8_0"), "cache_type_k"),
        (replace(SMALL, flash_attention=False), "flash_attention"),
    ):
        other = LlamaContext(model, settings)
        with pytest.raises(ForeignState, match=told):
            other.restore_sequence(1, path, IDENTITY)
        other.close()


def test_a_full_cache_leaves_a_saved_prefix_for_later(model: LlamaModel, tmp_path: Path) -> None:
    path = tmp_path / "x.head"
    context = LlamaContext(model, SMALL)
    context.decode([Work(0, words(100), 0, False)])
    context.save_sequence(0, path, words(100), IDENTITY)
    for sequence in (1, 2):
        context.decode([Work(sequence, words(200, sequence), 0, False)])
    with pytest.raises(EngineError, match="failed to find 100 available cells"):
        context.restore_sequence(3, path, IDENTITY)
    assert context.length(3) == 0
    context.cut(2, 0)
    assert context.restore_sequence(3, path, IDENTITY) == tuple(words(100))
    context.close()
