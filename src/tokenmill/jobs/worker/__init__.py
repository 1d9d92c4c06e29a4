"""Runs jobs on an engine.

loop: decide, start, take results, store them.  attempts: one try of a job.  job_buffer: the jobs in memory.
completion, retries: what happens when an attempt ends.  async_store: the blocking store, called from one thread.
stats, reuse: throughput, and prompts computed against the minimum.  pool, pool_summary: several engines.
"""
