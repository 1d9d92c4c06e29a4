"""Writes a 2-layer Qwen3-MoE with random weights and a real tokenizer; run by vLLM's Python, which has transformers.

    .venv-vllm/bin/python tiny_moe_weights.py WORDS.json FOLDER

WORDS.json holds a byte-level BPE vocabulary as `tiny_moe.py` takes it out of a GGUF. Knows nothing of tokenmill.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-not-found]
from transformers import (  # type: ignore[import-not-found]
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CONTEXT = 4096


def tokenizer(words: dict[str, Any]) -> Any:
    """The vocabulary as transformers keeps it."""
    vocabulary = {token: number for number, token in enumerate(words["tokens"])}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in words["merges"])]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in words["special"]])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=words["bos"],
        eos_token=words["eos"],
        pad_token=words["eos"],
        chat_template=words["chat_template"],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def model(vocabulary: int, eos: int) -> Any:
    """Two layers, eight experts of which two are used."""
    torch.manual_seed(7)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=eos,
        eos_token_id=eos,
        pad_token_id=eos,
        dtype=torch.bfloat16,
    )
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def main(source: str, folder: str) -> None:
    """Write config, weights, tokenizer and template."""
    words = json.loads(Path(source).read_text())
    made = tokenizer(words)
    made.save_pretrained(folder)
    model(len(words["tokens"]), words["tokens"].index(words["eos"])).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
