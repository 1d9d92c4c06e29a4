"""Plans over several hosts: llama.cpp's RPC workers, and vLLM on Ray.

hosts     the hosts, the network between them, and their shares of the layers
make      the plan
forecast  its speed, including the network's part of a step
worker    one RPC worker; vllm the same for vLLM
"""
