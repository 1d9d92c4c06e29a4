"""Measured bandwidth of memories, disks and links (`probe --measure`):

`measure` runs everything; `threads` is the streaming loop that the others share.
"""
