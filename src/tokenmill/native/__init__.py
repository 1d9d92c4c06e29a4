"""llama.cpp through its C API."""
