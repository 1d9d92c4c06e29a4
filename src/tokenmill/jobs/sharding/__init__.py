"""Assigns ranges of the job queue (shards) to workers.

allocator: assigns shards, with a table in memory; postgres_shards: with tables on a server.  policy: chooses the next
shard (pure).  reader: reads jobs from the store.  coordination, worker_lease: processes that share a store.
"""
