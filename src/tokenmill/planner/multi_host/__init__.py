"""Plans over several hosts: llama.cpp's RPC workers, and vLLM on Ray.

hosts     values of a plan and the share of each host
make      the entry point; plans llama.cpp with RPC workers
vllm      plans vLLM on Ray
worker    the share of one RPC worker
forecast  speed, including the network terms of a step
"""
