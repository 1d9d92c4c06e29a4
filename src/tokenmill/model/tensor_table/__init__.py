"""Names and shapes of a model's tensors, derived from its GGUF keys.

The rules follow llama.cpp's loaders: given the same keys, llama.cpp requests exactly these tensors.

slots      the entry point: all tensors of a model, in file order
parts      pieces that architectures share: attention, experts, prediction layers; facts that no key contains
attention  layers of architectures that only attend
hybrid     layers of architectures with recurrent state
"""
