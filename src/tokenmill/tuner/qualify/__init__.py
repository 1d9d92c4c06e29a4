"""Checks whether a quantization of a model is good enough to use.

tasks       the questions: a chronicle, JSON, code, texts (tasks.toml)
judge       whether an answer is right; pure
agreement   how often model and reference choose the same token
result      scores and the verdict
run         sends everything to an engine
"""
