"""tokenmill: a resident batch engine for models that are too big for the machine."""

__version__ = "0.1.0"
