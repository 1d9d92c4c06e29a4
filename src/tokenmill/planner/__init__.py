"""Turns a machine, a model profile and a goal into a plan: tensor placement, bytes per tier, expected speed. Pure.

goal, plan             what the user wants; the result
make                   the entry point; draft and choices are its steps
placement, split       tensors to tiers; layers to GPUs
alternatives           the cheapest changes that make a plan fit
memory, compute_graph  bytes
speed                  tokens per second
multi_host, vllm       several hosts; vLLM's memory
render                 a plan as text and HTML
"""
