"""Tensor and file types equal those of the installed `gguf` package."""

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from tokenmill.model.describe import FILE_TYPES
from tokenmill.model.tensor_types import BY_NUMBER


def test_mainline_types_are_those_of_the_package() -> None:
    known = {
        number: (kind.name, kind.block, kind.block_bytes, kind.row_bytes)
        for number, kind in BY_NUMBER.items()
        if not kind.ik
    }
    assert known == {int(kind): (kind.name, *GGML_QUANT_SIZES[kind], 0) for kind in GGMLQuantizationType}


def test_file_types_are_those_of_the_package() -> None:
    assert {int(kind): kind.name.removeprefix("MOSTLY_") for kind in LlamaFileType} == FILE_TYPES
