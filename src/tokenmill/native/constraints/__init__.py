"""JSON schemas and grammars for the native engine, compiled in a limited process."""
