"""Assigns ranges of the job queue (shards) to workers.

view: the jobs that a worker may run.  allocator: assigns shards; policy: chooses the next one (pure).  table: which
worker has which shard, in memory (local_shards) or on a server (postgres_shards).  reader: reads jobs from the store.
coordination, worker_lease: processes that share a store.
"""
