"""Reads GPUs: `nvidia` (through `nvml`) and `amd`; `cards` lists the memory bandwidth of well-known GPUs."""
