"""Plans: which tensor lives in which memory, the bytes of every tier, and the speed to expect. Pure.

goal, plan             what is wanted; the result
make                   from machine, profile and goal to a plan; draft and choices are its steps
placement, split       tensors to tiers; layers to GPUs
alternatives           the cheapest changes that make a plan fit
memory, compute_graph  bytes;  speed  tokens per second
multi_host, vllm       several hosts; vLLM's memory
render                 a plan as text and HTML
"""
