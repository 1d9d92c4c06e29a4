"""Engines behind HTTP: llama-server, ik_llama.cpp, vLLM, or any server with an OpenAI-compatible API.

client             the engine
request, response  request bodies in each server's format; streamed responses
errors             refusals of a server as tokenmill's errors
facts, metrics     identity and settings of a running server; its counters
saved_slots        test whether llama-server restores saved slots
launch             the command that starts a server for a plan
address            URLs and API keys
embedded           llama-server from the xllamacpp wheel, as a program
"""
