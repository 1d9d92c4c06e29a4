"""Decides which job runs next, and in which slot. Pure: no clocks, files or engines.

scheduler: the decisions.  backlog, prefix_tree, prefix_groups: pending jobs, ordered by the prefixes they share.
cache_model: contents of the engine's prefix cache.  slot_assignment: the slots of an engine.  shape: its properties.
estimates, costs: expected answer lengths, and cost of a job.  crash_isolation: finds the job that crashes an engine.
"""
