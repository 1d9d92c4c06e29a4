"""A minimal model with a SentencePiece vocabulary: letters, single bytes and a few words."""

from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter


def write_spm(path: Path) -> Path:
    """Write the model; its answers are noise."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "<a><b",
        "<b>",
        "▁",
        "▁w",
        "or",
        "ord",
        "▁word",
        "he",
        "▁he",
        "llo",
        "▁hello",
        *(chr(code) for code in range(33, 127)),
    ]
    types = [2, 3, 3, *[6] * 256, 3, 3, *[1] * (len(words) - 261)]
    scores = [-float(index) for index in range(len(words))]
    file = GGUFWriter(path, "llama")
    file.add_context_length(64)
    file.add_embedding_length(32)
    file.add_block_count(1)
    file.add_head_count(1)
    file.add_head_count_kv(1)
    file.add_feed_forward_length(32)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_vocab_size(len(words))
    file.add_tokenizer_model("llama")
    file.add_token_list(words)
    file.add_token_scores(scores)
    file.add_token_types(types)
    file.add_add_space_prefix(True)
    names = {
        "token_embd": len(words),
        "blk.0.attn_q": 32,
        "blk.0.attn_k": 32,
        "blk.0.attn_v": 32,
        "blk.0.attn_output": 32,
        "blk.0.ffn_gate": 32,
        "blk.0.ffn_up": 32,
        "blk.0.ffn_down": 32,
    }
    for name, rows in names.items():
        file.add_tensor(f"{name}.weight", np.zeros((rows, 32), np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        file.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    assert GGUFReader(path).tensors
    return path
