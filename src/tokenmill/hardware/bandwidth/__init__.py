"""Measures the bandwidth of memories, disks and links (`probe --measure`).

`measure` is the entry point; `threads` runs the concurrent passes that the measurements share.
"""
