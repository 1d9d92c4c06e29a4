"""Storage of batches, jobs, answers, HTTP files and HTTP batches, in a SQLite file or on a PostgreSQL server.

    store.py          Store: for the process that runs jobs
    submissions.py    Submissions: adds, changes and removes batches
    reader.py         StoreReader: read access; the base class of Store
    http_batches.py   HttpBatches: files and batches submitted over HTTP
    gateway_db.py     migrates the database of older gateways
    integrity.py      checksums, and the check of a whole store
    backend.py        the protocol of a database, implemented by sqlite.py and postgres.py; open.py chooses
    queries.py, sql/  named queries, schemas and migrations
    address.py        the folder or server URL of a store

`jobs.sharding.coordination` and `jobs.sharding.worker_lease` decide which process runs which jobs.
"""
