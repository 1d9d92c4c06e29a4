"""Benchmarks of an engine through its serving interface.

run       the sections of a benchmark, in order
rig       an engine set up for measuring: repeats points, discards disturbed runs
served    timing of one request, and prompts that are not cached
rows      results: one row per point
sweep     speed by depth, threads and sequences
cache     the effect of the prompt cache
energy    joules per token
tables    CSV, Markdown and sentences
"""
