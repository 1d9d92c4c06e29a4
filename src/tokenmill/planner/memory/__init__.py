"""Bytes per memory tier.

costs     bytes of a model under given settings, item by item
kv_cells  cells of the KV cache and their size
ledger    every item by tier, in steady state and at the load peak
weights   copies of weights that engines make: repacked layouts, scratch pools
"""
