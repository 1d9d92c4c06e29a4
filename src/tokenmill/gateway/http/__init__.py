"""HTTP at the gateway's front.

listening: the server.  middleware: request IDs, keys, limits, errors, access log.  request: bodies read and checked.
response_writer, client_connection: answers, and clients that disconnect.  openapi: the generated document.
faults: every refusal and its status, 429 included.  keys, rate_limits: who may call, and how often.
"""
