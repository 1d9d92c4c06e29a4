"""What a model is: `read(path)` turns a file's header into one frozen `Profile`."""

from tokenmill.model.profile import Profile, TensorClass
from tokenmill.model.read import read

__all__ = ["Profile", "TensorClass", "read"]
