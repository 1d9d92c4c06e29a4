"""Checkpoints as vLLM and transformers load them, described by config.json and safetensors headers.

config              the fields of config.json, and the size of recurrent state
tensors             classes of tensors by name or shape; widths of keys and values
kv_layout           what each layer keeps per token
quantization        how the checkpoint was quantised
safetensors_header  one file's header;  safetensors  the whole folder to a `ModelProfile`
"""
