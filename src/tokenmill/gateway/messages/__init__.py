"""/v1/messages, Anthropic's API, translated to and from chats.

routes.py   create a message, count tokens
request.py  the model of request bodies, and a body as the body of a chat
blocks.py   messages and content blocks as chat messages
events.py   answers as messages and streaming events
"""
