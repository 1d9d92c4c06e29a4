"""Sizes of compute buffers, computed by replaying the allocations of an engine's graphs.

builder                 records the operations of a graph in order
llama_cpp               the graphs of llama.cpp, from llama_attention, llama_sparse, llama_recurrent and llama_experts
ik_llama, ik_attention  the graphs of ik_llama.cpp
allocator               packs the results into one buffer by ggml's rules
ik_memory, ik_options   ik_llama.cpp's memory and its --fit; the options that affect them
engines                 differences between engines and versions
"""
