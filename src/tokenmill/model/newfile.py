"""A new file appears whole under its name or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tokenmill.errors import TokenmillError, UsageError


@contextmanager
def new_file(target: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Write beside `target` and rename at the end; what fails leaves nothing behind."""
    if target.is_dir():
        raise UsageError(f"{target} is a folder", hint="give the name of the file to write")
    if target.exists() and not force:
        raise UsageError(f"{target} exists", hint="--force overwrites it")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            yield file
        part.replace(target)
    except OSError as error:
        hint = "create the folder first" if isinstance(error, FileNotFoundError) else None
        raise TokenmillError(f"cannot write {target}: {error.strerror}", hint=hint) from error
    finally:
        part.unlink(missing_ok=True)
