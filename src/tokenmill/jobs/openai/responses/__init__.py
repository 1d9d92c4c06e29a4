"""OpenAI's Responses API, translated to and from chats.

request.py   the model of request bodies, and a body as the body of a chat
items.py     input items as chat messages
tools.py     tools and tool_choice as those of a chat
answers.py   answers as response objects and output items
"""
