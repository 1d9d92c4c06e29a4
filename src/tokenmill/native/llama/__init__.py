"""llama.cpp through its C interface.

cdefs.py       declarations from llama.h, and the defaults that the library must return
library.py     opens the shared object and checks that it is the right one
log.py         the last lines of llama.cpp's log
settings.py    how a model is loaded and a context is made
model.py       a loaded model
vocab.py       its tokenizer
context.py     a context: cells, batches over them, logits
batch.py       the arrays of one batch
state_file.py  the saved cells of one prefix
breakdown.py   the bytes of a context by buffer type
dry_run.py     what llama.cpp would allocate, asked in a child process
"""
