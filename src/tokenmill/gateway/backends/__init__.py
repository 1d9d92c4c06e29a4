"""Engines as the gateway uses them.

backend: the protocol.  managed: with admission control, a circuit breaker and health checks.  late_server: connects
when a server appears.  routing: which backend gets a request.  http_client, relay, passthrough: proxied servers.
"""
