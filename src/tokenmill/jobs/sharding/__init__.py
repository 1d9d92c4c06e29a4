"""Which worker works on which range of jobs.

allocator: one allocator, whose table is in memory or on the server (leased).  policy: which range next (pure).
reader: reads candidates from the store.  coordination, leases: other workers on the same store.
"""
