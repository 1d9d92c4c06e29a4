"""Benchmarks of an engine as it is served.

run       which parts are measured, in which order
rig       an engine set up for measuring: repeats points, discards disturbed runs
served    one request on the caller's clock, and text that no cache holds
rows      results: one row per point
sweep     speed by depth, threads and sequences
cache     what the prompt cache saves
energy    joules per token
tables    CSV, Markdown and sentences
"""
