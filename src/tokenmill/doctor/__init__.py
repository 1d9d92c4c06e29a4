"""Finds settings that slow a machine down, and the command that corrects each.

`gather` reads facts, `examine` runs the checks on them; the checks are pure.
"""
