"""Bytes per memory tier.

costs     bytes of each part of a model under given settings
drafting  prediction layers and draft models of speculative decoding
kv_cells  number and size of KV cells
ledger    bytes per tier and item, at the load peak, after loading and at full context
weights   weights that the CPU backend repacks, and scratch memory of products with weights
"""
