"""Model facts: `read(path)` turns a file's header into one frozen `Profile`.

read                       the entry point; reads a path, a URL, a repository, a config.json or a catalogue name
describe                   builds a profile from GGUF headers
gguf, gguf_write           reading and encoding of GGUF headers
sources, remote            bytes of local files and of URLs
architectures, kv_layout   classes of tensors; the KV cache of each layer
conversion, tensor_table   config.json -> GGUF keys -> names and shapes of tensors
description, derived       a model without files; one that is derived from a config.json
tensor_types, quant_mix    block sizes; the type of each tensor in a mix such as Q4_K_M
catalog, identity, verify  models by name; a hash of a model; comparison with published hashes
huggingface                folders of safetensors
synthetic                  files with a real header and no weights, or with random weights
pull                       downloads
"""

from tokenmill.model.profile import Profile, TensorClass
from tokenmill.model.read import read

__all__ = ["Profile", "TensorClass", "read"]
