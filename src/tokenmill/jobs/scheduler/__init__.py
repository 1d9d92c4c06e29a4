"""Which job goes to which slot. Pure: no clock, no file, no engine.

scheduler: the decisions.  backlog, prefix_tree, prefix_groups: pending jobs, sorted by the prefixes they share.
cache_model: what the engine's prefix cache holds.  slots: the sequences of an engine.  shape: what an engine offers.
estimates: how long answers will be and what they cost.  crash_isolation: finds the job that crashes an engine.
"""
