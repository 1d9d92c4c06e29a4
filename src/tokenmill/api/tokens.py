"""Counts tokens without an engine, with the vocabulary of a GGUF file."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill.api.planning.plan import EnginePlan, locate
from tokenmill.config import Config
from tokenmill.engine.pinned_prefixes import PinnedPrefix
from tokenmill.errors import UsageError
from tokenmill.model.read import read


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """`count` returns the number of tokens of a text; without a vocabulary it is None, and `why_not` says why."""

    count: Callable[[str], int] | None
    why_not: str | None = None


@contextmanager
def token_counter(model: str | None, config: Config) -> Iterator[TokenCounter]:
    """The token counter of a model; it has no `count` unless the model's GGUF file is on this machine."""
    if model is None:
        yield TokenCounter(None, "--model FILE.gguf counts tokens exactly")
        return
    path = Path(locate(model, config))
    if not path.is_file() or path.suffix != ".gguf":
        yield TokenCounter(None, f"{model} has no GGUF file on this machine to count tokens with")
        return
    if read(path).ghost:  # llama.cpp could crash on a damaged header, which read refuses
        yield TokenCounter(None, f"{model} is a header without weights, and its vocabulary is a placeholder")
        return
    from tokenmill.native.builds.finished import with_build  # noqa: PLC0415  reads the machine
    from tokenmill.native.llama.library import open_running  # noqa: PLC0415
    from tokenmill.native.llama.model import LlamaModel  # noqa: PLC0415
    from tokenmill.native.llama.settings import ModelSettings  # noqa: PLC0415

    engine = with_build(replace(config.engine, kind="native"), config.engines_path)
    library = open_running(_file(engine.library), header=_file(engine.header))
    opened = LlamaModel.load(library, path, ModelSettings(mmap=False), vocab_only=True)
    try:
        yield TokenCounter(lambda text: len(opened.vocab.tokenize(text, add_special=False)))
    finally:
        opened.close()


def _file(path: str | None) -> Path | None:
    return None if path is None else Path(path).expanduser()


def count_digests(
    digests: tuple[PinnedPrefix, ...], model: str, planned: EnginePlan, config: Config
) -> tuple[PinnedPrefix, ...]:
    """Digests with their number of tokens, where the model's vocabulary is on this machine.

    UsageError for a digest that does not fit the planned context, so that it is refused before a load.
    """
    if not digests:
        return ()
    with token_counter(model, config) as tokens:
        if tokens.count is None:
            return digests
        counted = tuple(replace(digest, tokens=tokens.count(digest.text)) for digest in digests)
    context = planned.plan.settings.context
    for digest in counted:
        if digest.tokens is not None and digest.tokens >= context:
            raise UsageError(
                f"the digest {digest.name} has {digest.tokens:,} tokens and does not fit the context of {context:,}",
                hint="raise context, or shorten the digest: tokenmill digest --tokens N",
            )
    return counted
