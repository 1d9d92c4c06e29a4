"""Measures how much context can be used before memory runs out.

judge          pure: whether the next step is safe, and the usable context
memory_watch   memory per device while the engine works
run            fills a context step by step
store          results and speeds in the measurement journal
"""
