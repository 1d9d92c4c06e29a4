"""Backends: the engines behind the gateway.

backend: the protocol.  managed: admission control, circuit breaker and health checks.  routing: the fallback chain of
a request.  late_server: a server that was unreachable at the start.  http_client, relay, passthrough: proxied servers.
"""
