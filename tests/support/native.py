"""Opens and closes a native context for tests."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenmill.native.llama.context import LlamaContext
from tokenmill.native.llama.library import Library, open_running
from tokenmill.native.llama.model import LlamaModel
from tokenmill.native.llama.settings import ContextSettings, ModelSettings


@dataclass(frozen=True)
class Work:
    """A row of a batch."""

    sequence: int
    tokens: Sequence[int]
    position: int
    logits: bool = True


def open_library() -> Library:
    """The wheel's library, or that of the build in TOKENMILL_TEST_BUILD."""
    build = os.environ.get("TOKENMILL_TEST_BUILD")
    return open_running() if not build else open_running(Path(build, "bin/libllama.so"), header=Path(build, "llama.h"))


@contextmanager
def loaded(path: Path, settings: ModelSettings | None = None) -> Iterator[LlamaModel]:
    """A model in this process."""
    model = LlamaModel.load(open_library(), path, settings or ModelSettings())
    yield model
    model.close()


@contextmanager
def opened(path: Path, settings: ContextSettings) -> Iterator[LlamaContext]:
    """A model with one context in this process."""
    with loaded(path) as model:
        context = LlamaContext(model, settings)
        yield context
        context.close()
