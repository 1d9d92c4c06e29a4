"""Checks whether a quantization of a model is good enough to use.

tasks       the tasks: a chronicle, JSON, code, texts (tasks.toml)
judge       pure: whether an answer is correct
agreement   how often a model and its reference predict the same token
result      scores, thresholds and the verdict
run         sends the tasks to an engine
"""
