"""A folder with a tiny Qwen3-MoE for vLLM: random weights, SmolLM2's vocabulary and chat template."""

import json
import subprocess
from pathlib import Path
from typing import Any

from gguf import GGUFReader

WEIGHTS = Path(__file__).with_name("tiny_moe_weights.py")
CONTROL = 3  # llama.cpp's type of tokens that are never text


def write_tiny_moe(folder: Path, words_of: Path, python: Path) -> Path:
    """Write the model into a folder, with the vocabulary of a GGUF, by a Python that has transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    words = folder / "words.json"
    words.write_text(json.dumps(_words(words_of)))
    subprocess.run([python, WEIGHTS, words, folder], check=True, capture_output=True, text=True, timeout=240)
    words.unlink()
    return folder


def _words(gguf: Path) -> dict[str, Any]:
    fields = GGUFReader(gguf).fields

    def said(name: str) -> Any:
        return fields[f"tokenizer.{name}"].contents()

    tokens = said("ggml.tokens")
    return {
        "tokens": tokens,
        "merges": said("ggml.merges"),
        "special": [word for word, kind in zip(tokens, said("ggml.token_type"), strict=True) if kind == CONTROL],
        "bos": tokens[said("ggml.bos_token_id")],
        "eos": tokens[said("ggml.eos_token_id")],
        "chat_template": said("chat_template"),
    }
