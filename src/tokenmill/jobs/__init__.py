"""Durable batches: lines of job files in, each answered once, in order, whatever happens in between."""
