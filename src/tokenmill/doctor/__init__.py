"""Finds settings that slow a machine down and suggests commands to correct them.

`gather` reads facts, `examine` runs the checks on them; the checks are pure.
"""
