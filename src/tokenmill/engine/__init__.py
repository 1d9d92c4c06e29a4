"""Engines: the interface that all of them implement, and the processes that run them.

engine                   the interface: requests, answers, capabilities
start, restart           start a planned server engine; replace an engine's process when it dies
warm, page_cache         warm up a started engine; read the model into the page cache before it
pinned_prefixes          keep prompt prefixes in the KV cache
reconcile, load_history  compare a load with its plan; store both in the measurement journal
process, limits          supervised processes; cores and memory reserved for other programs
loading, logs            progress of a load; facts from engine logs
server                   engines behind HTTP
ray, ray_engine, ray_nodes  engines on a Ray cluster
"""
