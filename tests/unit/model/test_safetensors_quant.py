"""Names of quantization schemes, and numbers of parameters in stored tensors."""

from typing import Any

import pytest

from tokenmill.model.huggingface.quantization import Meaning, QuantGroup, Scheme, meaning, scheme_of
from tokenmill.model.huggingface.safetensors_header import StoredTensor


def compressed(*groups: tuple[int, str, int | None, int | None]) -> dict[str, Any]:
    """Groups as (weight bits, type, group size, activation bits)."""
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {
            f"group_{index}": {
                "weights": {"num_bits": bits, "type": kind, "group_size": size},
                "input_activations": {"num_bits": act} if act else None,
            }
            for index, (bits, kind, size, act) in enumerate(groups)
        },
    }


@pytest.mark.parametrize(
    ("declared", "name"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq-4bit"),
        ({"quant_method": "gptq", "bits": 8}, "gptq-8bit"),
        ({"quant_method": "intel/auto-round", "bits": 4}, "auto-round-4bit"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bnb-nf4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bnb-int8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "awq-4bit"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "FP8"}},
            },
            "fp8+nvfp4",
        ),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}}, "mxfp4"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, "fp8"),
        (compressed((4, "int", 128, None)), "compressed-tensors w4a16"),
        (compressed((8, "int", None, 8)), "compressed-tensors w8a8"),
        (compressed((8, "float", None, 8)), "fp8"),
        (compressed((4, "float", 16, 4)), "nvfp4"),
        (compressed((4, "float", 32, None)), "mxfp4"),
        (compressed((4, "float", 16, 4), (8, "float", None, 8)), "nvfp4 + fp8"),
        (compressed((8, "float", None, 8), (4, "int", 32, None)), "fp8 + compressed-tensors w4a16"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "exl3", "bits": 3.5}, "exl3"),
        ({"quant_method": 7}, "unknown"),
    ],
)
def test_name_of_a_scheme(declared: dict[str, Any], name: str) -> None:
    assert scheme_of({"quantization_config": declared}).name == name


def test_modelopt_keeps_its_scheme_in_a_file_of_its_own() -> None:
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    assert scheme_of({}, beside) == Scheme("nvfp4", (QuantGroup(4, 16, is_float=True),))


def test_mlx_keeps_its_scheme_under_another_key() -> None:
    assert scheme_of({"quantization": {"bits": 6, "group_size": 64}}) == Scheme("mlx-6bit", (QuantGroup(6, 64),))


@pytest.mark.parametrize(
    "config", [{}, {"quantization_config": {}}, {"quantization_config": None}, {"quantization_config": "fp8"}]
)
def test_no_scheme(config: dict[str, Any]) -> None:
    assert scheme_of(config) == Scheme()


AWQ = {
    "m.qweight": StoredTensor("I32", (4096, 512)),
    "m.qzeros": StoredTensor("I32", (32, 512)),
    "m.scales": StoredTensor("F16", (32, 4096)),
}
GPTQ_3BIT = {
    "m.qweight": StoredTensor("I32", (384, 4096)),
    "m.qzeros": StoredTensor("I32", (32, 384)),
    "m.scales": StoredTensor("F16", (32, 4096)),
}
NVFP4 = {"m.weight": StoredTensor("U8", (64, 32)), "m.weight_scale": StoredTensor("F8_E4M3", (64, 4))}
FUSED = {"m": StoredTensor("U8", (8, 32, 64)), "m_weight_scale": StoredTensor("F8_E4M3", (8, 4, 64))}
PACKED = {"m.weight_packed": StoredTensor("I32", (64, 16)), "m.weight_scale": StoredTensor("BF16", (64, 4))}
MX_SPLIT = {"m.weight": StoredTensor("I8", (64, 32)), "m.scale": StoredTensor("F8_E8M0", (64, 2))}
MX8 = {"m.weight": StoredTensor("U8", (64, 64)), "m.weight_scale": StoredTensor("U8", (64, 2))}
BLOCKS = {"m_blocks": StoredTensor("U8", (8, 64, 2, 16)), "m_scales": StoredTensor("U8", (8, 64, 2))}
INT8 = {"m.weight": StoredTensor("I8", (64, 64)), "m.weight_scale": StoredTensor("BF16", (64, 1))}
FP8 = {"m.weight": StoredTensor("F8_E4M3", (256, 256)), "m.weight_scale_inv": StoredTensor("F32", (2, 2))}
NF4 = {"m.weight": StoredTensor("U8", (2048, 1)), "m.weight.absmax": StoredTensor("U8", (64,))}
MLX = {
    "m.weight": StoredTensor("U32", (64, 16)),
    "m.scales": StoredTensor("BF16", (64, 2)),
    "m.biases": StoredTensor("BF16", (64, 2)),
}
BITNET = {"m.weight": StoredTensor("U8", (16, 64)), "m.weight_scale": StoredTensor("BF16", (1,))}
INT4 = Scheme("compressed-tensors w4a16", (QuantGroup(8, None), QuantGroup(4, 32)))


@pytest.mark.parametrize(
    ("table", "name", "scheme", "expected"),
    [
        (AWQ, "m.qweight", Scheme(), Meaning(4096 * 4096, "INT4")),
        (AWQ, "m.qzeros", Scheme(), Meaning(0, "I32")),
        (AWQ, "m.scales", Scheme(), Meaning(0, "F16")),
        (GPTQ_3BIT, "m.qweight", Scheme("gptq-3bit", (QuantGroup(3),)), Meaning(4096 * 4096, "INT3")),
        (
            {"m.qweight": AWQ["m.qweight"]},
            "m.qweight",
            Scheme("awq-4bit", (QuantGroup(4),)),
            Meaning(4096 * 4096, "INT4"),
        ),
        ({"m.qweight": AWQ["m.qweight"]}, "m.qweight", Scheme(), Meaning(4096 * 4096, "INT4", guessed=True)),
        (NVFP4, "m.weight", Scheme(), Meaning(64 * 64, "NVFP4")),
        (NVFP4, "m.weight_scale", Scheme(), Meaning(0, "F8_E4M3")),
        (FUSED, "m", Scheme(), Meaning(8 * 64 * 64, "NVFP4")),
        (FUSED, "m_weight_scale", Scheme(), Meaning(0, "F8_E4M3")),
        (PACKED, "m.weight_packed", INT4, Meaning(64 * 128, "INT4")),
        (PACKED, "m.weight_packed", Scheme(), Meaning(64 * 128, "INT4", guessed=True)),
        (MX_SPLIT, "m.weight", Scheme(), Meaning(64 * 64, "MXFP4")),
        (MX_SPLIT, "m.scale", Scheme(), Meaning(0, "F8_E8M0")),
        (MX8, "m.weight", Scheme(), Meaning(64 * 64, "U8")),
        (BLOCKS, "m_blocks", Scheme(), Meaning(8 * 64 * 64, "MXFP4")),
        (BLOCKS, "m_scales", Scheme(), Meaning(0, "U8")),
        (INT8, "m.weight", Scheme(), Meaning(64 * 64, "I8")),
        (FP8, "m.weight", Scheme(), Meaning(256 * 256, "F8_E4M3")),
        (FP8, "m.weight_scale_inv", Scheme(), Meaning(0, "F32")),
        (NF4, "m.weight", Scheme("bnb-nf4"), Meaning(4096, "NF4")),
        (NF4, "m.weight.absmax", Scheme("bnb-nf4"), Meaning(0, "U8")),
        (MLX, "m.weight", Scheme("mlx-4bit", (QuantGroup(4, 64),)), Meaning(64 * 128, "INT4")),
        (MLX, "m.biases", Scheme("mlx-4bit", (QuantGroup(4, 64),)), Meaning(0, "BF16")),
        (BITNET, "m.weight", Scheme("bitnet", (QuantGroup(2),)), Meaning(64 * 64, "INT2")),
        ({"m.weight": StoredTensor("BF16", (3, 5))}, "m.weight", Scheme(), Meaning(15, "BF16")),
        ({"router.scale": StoredTensor("BF16", (64,))}, "router.scale", Scheme(), Meaning(64, "BF16")),
        ({"m.weight": StoredTensor("U8", (3, 5))}, "m.weight", Scheme(), Meaning(15, "U8")),
        ({"position_ids": StoredTensor("I64", (1, 512))}, "position_ids", Scheme(), Meaning(0, "I64")),
        ({"m.weight": StoredTensor("F99", (3, 5))}, "m.weight", Scheme(), Meaning(15, "F99")),
        ({"m.weight": StoredTensor("BF16", ())}, "m.weight", Scheme(), Meaning(1, "BF16")),
    ],
)
def test_parameters_behind_stored_numbers(
    table: dict[str, StoredTensor], name: str, scheme: Scheme, expected: Meaning
) -> None:
    assert meaning(name, table[name], table.get, scheme) == expected
