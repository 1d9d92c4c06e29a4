"""From a published config.json to the keys of the GGUF that llama.cpp's convert_hf_to_gguf.py writes.

convert    the entry point: finds the family of a config and returns architecture, keys and extras
fields     lookups in a config with errors that name the missing field; keys that all families have
attention  families whose layers all attend: DeepSeek, Kimi-K2, GLM, Qwen3, Llama, gpt-oss, MiniMax and others
hybrid     families with recurrent layers: Qwen3-Next, Qwen3.5, Kimi-K3, Ling-3, Nemotron-H
"""
