"""Commands that describe the machine and the model and plan before loading."""
