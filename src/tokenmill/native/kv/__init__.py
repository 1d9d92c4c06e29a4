"""The KV cells and the prefixes in them; pure, without llama.cpp.

radix.py          the radix tree of token prefixes
sequence_pool.py  sequence ids and the cells that they own
prefix_cache.py   cached prefixes: lookup, sharing, eviction
streams.py        contexts in which every slot has its own cells
"""
