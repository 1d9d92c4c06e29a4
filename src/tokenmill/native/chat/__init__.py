"""Chat templates: turns a conversation into the prompt that the model was trained on.

template.py      finds a model's template and renders conversations, byte-equal to llama-server
messages.py      OpenAI messages in the form that templates expect
families.py      template families that llama.cpp treats specially
capabilities.py  what a template supports, found by rendering small conversations
reasoning.py     how a template marks reasoning, found in the same way
sandbox.py       jinja2's sandbox with llama.cpp's few departures from Jinja
renderer.py      runs all of the above in a child process with limits of memory and time
"""
