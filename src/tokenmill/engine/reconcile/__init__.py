"""Compares what an engine loaded with its plan."""
