"""A native context for tests, opened and closed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenmill.native.llama.context import Context
from tokenmill.native.llama.library import open_running
from tokenmill.native.llama.model import Model
from tokenmill.native.llama.settings import ContextSettings, ModelSettings


@dataclass(frozen=True)
class Work:
    """A row of a batch."""

    sequence: int
    tokens: Sequence[int]
    position: int
    logits: bool = True


@contextmanager
def loaded(path: Path, settings: ModelSettings | None = None) -> Iterator[Model]:
    """A model in this process."""
    model = Model.load(open_running(), path, settings or ModelSettings())
    yield model
    model.close()


@contextmanager
def opened(path: Path, settings: ContextSettings) -> Iterator[Context]:
    """A model with one context in this process."""
    with loaded(path) as model:
        context = Context(model, settings)
        yield context
        context.close()
