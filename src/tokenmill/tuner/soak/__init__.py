"""How much context can really be used before memory runs out.

judge          whether the next step is safe, and what can be used; pure
memory_watch   memory per device while the engine works
run            fills a context step by step
store          results and speeds in the measurement journal
"""
