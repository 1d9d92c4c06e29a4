"""Running engines: the `Engine` protocol, and everything around an engine's process.

engine: the protocol.  start, restart: a plan to a running engine; an engine whose process is replaced when it dies.
warm, pinned_prefixes, page_cache: what makes it fast before the first request.  reconcile: plan against measurement.
load_history: both, in the measurement journal.  process, limits, loading, logs, server; ray: engines on a Ray cluster.
"""
