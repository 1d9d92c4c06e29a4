"""Batches, jobs, answers, HTTP files and HTTP batches, in a SQLite file or on a PostgreSQL server.

    store.py          Store: what a process that works on jobs does with them
    submissions.py    Submissions: how batches get in, change and go
    reader.py         Reader: everything that only reads; Store is one
    http_batches.py   HttpBatches: files and batches that were submitted by HTTP
    desk.py           takes over the database of older gateways
    integrity.py      checksums and the check of a whole store
    backend.py        the protocol of a database; sqlite.py and postgres.py implement it; open.py chooses
    queries.py, sql/  named queries, schemas and migrations
    address.py        a folder or the URL of a server

A coordinator decides which process has which jobs: `jobs/sharding/coordination.py`, `jobs/sharding/worker_lease.py`.
"""
