"""Model facts: `read(path)` turns a file's header into one frozen `Profile`.

read                        a path, a URL or a catalogue name
gguf, gguf_write            GGUF headers, read and written
sources, remote             local files; files behind HTTP range requests
architectures, kv_layout    classes and shapes of tensors; the KV cache of each layer
tensor_types, quant_mix     block sizes; the type of each tensor in a mix such as Q4_K_M
catalog, identity, verify   models by name; a short name for the same bytes; published hashes
huggingface, synthetic, pull
"""

from tokenmill.model.profile import Profile, TensorClass
from tokenmill.model.read import read

__all__ = ["Profile", "TensorClass", "read"]
