"""Commands that run, check and manage batches."""
