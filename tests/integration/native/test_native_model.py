"""Models loaded by the real llama.cpp: facts, progress, and load errors."""

from pathlib import Path

import pytest

from support.native import loaded, open_library
from support.odd_models import chunked, recurrent, windowed
from tokenmill.errors import EngineError
from tokenmill.model.synthetic import generate
from tokenmill.native.llama.context import LlamaContext, most_sequences
from tokenmill.native.llama.library import Library
from tokenmill.native.llama.log import LlamaLog
from tokenmill.native.llama.model import LlamaModel
from tokenmill.native.llama.settings import ContextSettings, ModelSettings


@pytest.fixture(scope="module")
def library() -> Library:
    return open_library()


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "moe.gguf"
    generate.write("moe-mla", generate.sizes("moe-mla", {"layers": 2, "embed": 256}), path)
    return path


def test_facts_of_a_real_model(library: Library, smollm2_path: Path) -> None:
    shares: list[float] = []

    def progress(share: float) -> bool:
        shares.append(share)
        return True

    model = LlamaModel.load(library, smollm2_path, ModelSettings(), progress)
    facts = model.facts
    assert (facts.architecture, facts.parameters, facts.trained_context) == ("llama", 134_515_008, 8192)
    assert (facts.window, facts.shares, facts.why_not) == (None, True, None)
    assert facts.bytes == 96_576_768
    assert "llama" in facts.description
    assert model.metadata("general.architecture") == "llama"
    assert model.metadata("no.such.key") is None
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert shares == sorted(shares)
    model.close()
    model.close()  # once is enough
    with pytest.raises(EngineError, match="no longer loaded"):
        _ = model.pointer


def test_a_load_can_be_stopped(library: Library, smollm2_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot load"):
        LlamaModel.load(library, smollm2_path, ModelSettings(), lambda share: share < 0.3)


def test_an_error_of_the_progress_ends_the_load(library: Library, smollm2_path: Path) -> None:
    def progress(_share: float) -> bool:
        raise EngineError("the load was cancelled")

    with pytest.raises(EngineError, match="the load was cancelled"):
        LlamaModel.load(library, smollm2_path, ModelSettings(), progress)


@pytest.mark.parametrize(
    "settings", [ModelSettings(mmap=False), ModelSettings(repack=False), ModelSettings(overrides=(("exps", "CPU"),))]
)
def test_ways_to_load(library: Library, moe: Path, settings: ModelSettings) -> None:
    model = LlamaModel.load(library, moe, settings)
    assert model.facts.architecture == "deepseek2"
    context = LlamaContext(model, ContextSettings(cells=256, context=256, sequences=2))
    names = {buffer.name for buffer in context.buffers() if buffer.model_bytes}
    assert ("CPU_Mapped" in names) == settings.mmap
    assert ("CPU_REPACK" in names) == settings.repack  # a second copy of the mapped weights
    assert sum(buffer.model_bytes for buffer in context.buffers()) >= model.facts.bytes
    context.close()
    model.close()


@pytest.mark.parametrize(
    ("make", "window", "why_not"),
    [(windowed, 32, None), (chunked, 8192, None), (recurrent, None, None)],
    ids=["windowed", "chunked", "recurrent"],
)
def test_other_kinds_of_memory(tmp_path: Path, make: object, window: int | None, why_not: str | None) -> None:
    assert callable(make)
    with loaded(make(tmp_path / "odd.gguf")) as model:
        assert model.facts.window == window
        assert model.facts.shares == (why_not is None)
        assert (why_not or "") in (model.facts.why_not or "")
        assert most_sequences(model) == model.library.max_sequences // (1 if window is None else 2) - 1


@pytest.mark.parametrize(
    ("content", "told", "hint"),
    [
        (b"no model", "invalid magic", "failed to load"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 64, "cannot load", "failed to load"),
    ],
)
def test_a_file_that_is_none(library: Library, tmp_path: Path, content: bytes, told: str, hint: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(EngineError, match=told) as caught:
        LlamaModel.load(library, path, ModelSettings())
    assert hint in (caught.value.hint or "")


def test_an_unknown_architecture(library: Library, tmp_path: Path) -> None:
    path = windowed(tmp_path / "new.gguf")
    path.write_bytes(path.read_bytes().replace(b"cohere2", b"cohere9"))
    with pytest.raises(EngineError, match="'cohere9'") as caught:
        LlamaModel.load(library, path, ModelSettings())
    assert "newer" in (caught.value.hint or "")


def test_no_file_and_no_such_device(library: Library, tmp_path: Path, moe: Path) -> None:
    with pytest.raises(EngineError, match="no model file"):
        LlamaModel.load(library, tmp_path / "none.gguf", ModelSettings())
    with pytest.raises(EngineError, match="GPU3"):
        LlamaModel.load(library, moe, ModelSettings(overrides=(("exps", "GPU3"),)))


def test_a_library_without_gpus_refuses_layers_for_them(library: Library, moe: Path) -> None:
    with pytest.raises(EngineError) as refused:
        LlamaModel.load(library, moe, ModelSettings(gpus=(0,), gpu_layers=3))
    assert refused.value.code == "gpu_not_supported"


def test_the_log_is_kept_short_and_handed_on(library: Library, smollm2_path: Path) -> None:
    heard: list[str] = []
    log = LlamaLog(library, keep_lines=5, sink=lambda _level, line: heard.append(line))
    model = LlamaModel.load(library, smollm2_path, ModelSettings(), log=log)
    model.close()
    assert len(heard) > 50
    assert any("SmolLM2" in line for line in heard)
    assert not any("\n" in line for line in heard)
    assert len(log.lines(least=0)) == 5
    assert log.since(log.mark()) == ()
    assert log.error(0) is None
