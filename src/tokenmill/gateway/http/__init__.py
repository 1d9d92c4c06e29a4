"""HTTP server of the gateway.

listening: uvicorn with connection limits.  middleware: request IDs, authentication, access log.
request: parsing and validation of bodies.  response_writer, client_connection: slow clients and disconnects.
faults: errors and their status.  keys, rate_limits: API keys and their limits.  openapi: route groups and the document.
"""
