"""Finds the files that hold a safetensors model and reads their headers, checked against the index.

With an index the files are those it names; without one, every safetensors file that is not a second copy.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tokenmill.errors import CorruptModel, MissingSplit, UsageError
from tokenmill.model.hf_config import printable, read_object
from tokenmill.model.safetensors_header import Header, read_header

_INDEX = "model.safetensors.index.json"
_PART_OF = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


def shards_in(folder: Path, file: Path | None) -> dict[Path, frozenset[str]]:
    """The files that hold the model, each with the tensors the index promises in it."""
    index = folder / _INDEX
    if not index.is_file():
        others = sorted(folder.glob("*.safetensors.index.json"))
        index = others[0] if len(others) == 1 else index
    if index.is_file():
        promised = _promised(index)
        if file is None or file.name in promised:
            missing = next((name for name in promised if not (folder / name).is_file()), None)
            if missing is not None:
                raise MissingSplit(f"{folder / missing} is missing; {index.name} lists it", hint="fetch that file")
            return {folder / name: names for name, names in promised.items()}
    files = _unlisted(folder) if file is None else [file]
    if not files:
        other = next((kind for kind in ("*.gguf", "*.bin", "*.pth", "*.pt") if any(folder.glob(kind))), None)
        raise UsageError(
            f"{folder} holds no safetensors files" + (f", only {other}" if other else ""),
            hint="name the .gguf file itself" if other == "*.gguf" else "give a folder with *.safetensors",
        )
    return {item: frozenset() for item in _whole_sets(files)}


def _promised(index: Path) -> dict[str, frozenset[str]]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptModel(f"{index} has no weight_map", hint="fetch this file again")
    by_file: dict[str, list[str]] = {}
    try:
        for tensor, file in weight_map.items():
            by_file.setdefault(file, []).append(tensor)
    except TypeError:
        raise CorruptModel(f"{index}: its weight_map does not name files", hint="fetch this file again") from None
    for file in by_file:
        if not printable(file) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CorruptModel(f"{index} sends a tensor to {str(file)[:80]!r}, which is not a file of this folder")
    return {file: frozenset(by_file[file]) for file in sorted(by_file)}


def _unlisted(folder: Path) -> list[Path]:
    """Without an index: model.safetensors alone, or everything but second copies and adapters."""
    files = sorted(folder.glob("*.safetensors"))
    main = [file for file in files if file.name == "model.safetensors"]
    first = [file for file in files if not file.name.startswith(("consolidated", "adapter"))]
    return main or first or files


def _whole_sets(files: Iterable[Path]) -> list[Path]:
    """Files named 00001-of-00004 bring the rest of their set, which must be there."""
    found: dict[Path, None] = {}
    for file in files:
        match = _PART_OF.fullmatch(file.name)
        numbers = range(1, int(match[3]) + 1) if match else ()
        for number in numbers:
            part = file.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.safetensors") if match else file
            if part not in found and not part.is_file():
                raise MissingSplit(f"{part} is missing, one of {len(numbers)} files", hint="fetch that file")
            found[part] = None
        found[file] = None
    return list(found)


def headers_of(shards: Mapping[Path, frozenset[str]]) -> Iterator[Header]:
    """Read the headers one after another, checked against what the index promises."""
    for path, promised in shards.items():
        header = read_header(path, split=len(shards) > 1)
        if promised and (absent := promised.difference(entry.name for entry in header.entries)):
            raise CorruptModel(
                f"{path} lacks {len(absent)} tensors that the index promises, such as {str(min(absent))[:80]!r}",
                hint="index and files are of different versions: fetch both again",
            )
        yield header
