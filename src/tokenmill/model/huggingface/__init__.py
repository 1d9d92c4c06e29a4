"""Checkpoints as vLLM and transformers load them, described by config.json and safetensors headers.

safetensors         the entry point; reads a folder into a `Profile`
safetensors_header  reads the header of one file
config              the fields of config.json, and the size of recurrent state
tensors             classes of tensors by name or shape; widths of keys and values
kv_layout           the KV cache of each layer
quantization        the quantization scheme, and the parameters of stored tensors
"""
