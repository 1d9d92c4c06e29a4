"""Runs jobs on an engine.

loop: dispatch jobs, collect results, store them.  attempts: one try of a job.  job_buffer: the jobs in memory.
completion, retries: what follows the end of an attempt.  async_store: the blocking store, called from one thread.
throughput, reuse, stats: measured speed, cache misses, and the statistics of a run.  progress: snapshots and reports.
liveness: watches the engine.  pool, pool_summary: several engines.
"""
