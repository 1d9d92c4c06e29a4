"""The version of tokenmill, in a separate module that every layer may import."""

__version__ = "0.1.0"
