"""Engines behind HTTP: llama-server, ik_llama.cpp, vLLM, or anything that speaks OpenAI's protocol.

client: the engine.  request, response: bodies as each server spells them, and what it streams back.
facts: what a running server says about itself.  metrics: its counters.  saved_slots: llama-server's slot files.
launch: what to run for a plan.  address: where a server is, and its key.  embedded: llama-server out of the wheel.
"""
