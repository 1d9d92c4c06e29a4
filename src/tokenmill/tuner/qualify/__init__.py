"""Whether a quantization of a model is good enough to use.

tasks       what the model is asked: a chronicle, JSON, code, texts (tasks.toml)
judge       whether an answer is right; pure
agreement   how often model and reference choose the same token
result      scores and the verdict
run         asks an engine everything
"""
