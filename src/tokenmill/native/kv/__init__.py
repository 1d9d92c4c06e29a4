"""The KV cells and the prefixes in them; pure, without llama.cpp.

radix.py          the radix tree of token prefixes
sequence_pool.py  sequence ids and the cells they hold
prefix_cache.py   what a new sequence reuses, and what is evicted
streams.py        contexts in which every slot has cells of its own
"""
