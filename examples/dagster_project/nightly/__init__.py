"""A small pipeline for every night."""
