"""Graphics cards: `nvidia` (through `nvml`) and `amd`; `cards` has the memory bandwidth of well-known ones."""
