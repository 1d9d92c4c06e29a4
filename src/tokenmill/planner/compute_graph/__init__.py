"""Sizes of compute buffers, found by replaying the graphs that an engine builds.

builder    records intermediate results in the order of computation
llama_cpp  the graphs of llama.cpp; ik_llama and ik_attention those of ik_llama.cpp
allocator  packs them into one buffer by ggml's rules
ik_memory  ik_llama.cpp's per-device buffers and its --fit
engines    what the engines and their versions allocate differently
"""
