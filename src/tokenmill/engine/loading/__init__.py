"""Loads while they run: progress, and why one is slow.

watch takes samples of the engine's processes; process and system read them; progress turns bytes into a rate and an
end time; diagnosis explains in words why a load is slow.
"""
