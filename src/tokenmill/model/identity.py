"""Identifies a model by a hash, without reading all its bytes.

The hash is sha256 over the length and header of every file and over 64 blocks of 4 KiB spread evenly over all tensor
data, because a fine-tune with an equal header differs in almost all weights. A change outside these blocks, such as a
few edited rows, is not detected. Names of files and folders do not matter; for safetensors, the config, tokenizer and
chat template in the folder do.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from tokenmill.errors import CorruptModel, UnknownModel
from tokenmill.model import catalog
from tokenmill.model.gguf import is_url, read_header
from tokenmill.model.read import read
from tokenmill.model.sources import FileSource
from tokenmill.units import KIB, MIB

BLOCKS = 64
BLOCK_BYTES = 4 * KIB
_FORM = b"tokenmill model 1"
_U64 = struct.Struct("<Q")
_SAFETENSORS_EXTRAS = (
    "config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def identity_of(path: str | Path) -> str:
    """The identity of a GGUF (any split) or a folder of safetensors, as 64 hexadecimal digits.

    Raises `UnknownModel` for URLs and catalogue names.
    """
    profile = None if is_url(path) else read(path)
    if profile is None or profile.format == "catalog":
        raise UnknownModel(f"{path} has not been downloaded", hint=catalog.pull_hint(str(path)))
    total = hashlib.sha256(_FORM)
    with ExitStack() as stack:
        files = [stack.enter_context(closing(FileSource(Path(file.path)))) for file in profile.files]
        starts = [_data_offset(file) for file in files]
        for file, start in zip(files, starts, strict=True):
            total.update(_U64.pack(file.size) + _U64.pack(start))
            for at in range(0, start, MIB):
                total.update(file.read(at, min(MIB, start - at)))
        for block in _sampled(files, starts):
            total.update(block)
    if profile.format == "safetensors":
        folder = Path(profile.files[0].path).parent
        for name in _SAFETENSORS_EXTRAS:
            if (folder / name).is_file():
                content = (folder / name).read_bytes()
                total.update(name.encode() + _U64.pack(len(content)) + content)
    return total.hexdigest()


def _data_offset(file: FileSource) -> int:
    """Offset of the tensor data."""
    first = file.read(0, 8)
    if first[:4] == b"GGUF":
        return min(read_header(file.name).data_offset, file.size)
    if len(first) < 8:
        raise CorruptModel(f"{file.name} is too short for a model", hint="download it again")
    return min(8 + int(_U64.unpack(first)[0]), file.size)


def _sampled(files: Sequence[FileSource], starts: Sequence[int]) -> Iterator[bytes]:
    """Evenly spaced blocks over the concatenated data of all files, including the first and last."""
    sizes = [file.size - start for file, start in zip(files, starts, strict=True)]
    last = max(0, sum(sizes) - BLOCK_BYTES)
    for number in range(BLOCKS):
        at = last * number // (BLOCKS - 1)
        for file, start, size in zip(files, starts, sizes, strict=True):
            if at < size:
                yield file.read(start + at, min(BLOCK_BYTES, size - at))
                break
            at -= size
