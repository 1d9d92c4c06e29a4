"""Loads while they run: progress, and why one is slow.

watch takes a sample of the engine's processes at a time; progress turns bytes into a rate and an end time;
process and system read what is sampled; diagnosis says in words why a load is slow.
"""
