"""Counting tokens for commands that run no engine: with a model file's vocabulary, of which nothing else is read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenmill.cli.named import where
from tokenmill.cli.output import Common
from tokenmill.errors import EngineError
from tokenmill.model.read import read


@dataclass(frozen=True, slots=True)
class Tokeniser:
    """A way to count; without a function there is none, and the reason says why."""

    count: Callable[[str], int] | None
    why_not: str | None = None


@contextmanager
def tokeniser(model: str | None, common: Common) -> Iterator[Tokeniser]:
    """The vocabulary of a model whose GGUF is here; for others none."""
    if model is None:
        yield Tokeniser(None, "--model FILE.gguf counts them")
        return
    path = Path(where(model, common))
    if not path.is_file() or path.suffix != ".gguf":
        yield Tokeniser(None, f"{model} has no GGUF file here, whose vocabulary could count them")
        return
    try:
        import cffi  # noqa: F401, PLC0415  an extra
        import xllamacpp  # noqa: F401, PLC0415
    except ImportError:
        yield Tokeniser(None, "pip install 'tokenmill[native]' counts them")
        return
    read(path)  # a damaged header is better refused in Python than in C
    from tokenmill.engine.native.running import Log, open_running  # noqa: PLC0415
    from tokenmill.engine.native.vocab import Vocab  # noqa: PLC0415

    library = open_running()
    log = Log(library)
    library.lib.llama_backend_init()
    params = library.lib.llama_model_default_params()
    params.vocab_only, params.load_mode = True, 0
    pointer = library.lib.llama_model_load_from_file(str(path).encode(), params)
    if pointer == library.ffi.NULL:
        raise EngineError(f"llama.cpp cannot read the vocabulary of {path.name}", hint=log.last())
    vocab = Vocab(library, pointer, log)
    try:
        yield Tokeniser(lambda text: len(vocab.tokenise(text, add_special=False)))
    finally:
        vocab.close()
        library.lib.llama_model_free(pointer)
