"""`tokenmill summarize`: a summary of every document that is new or has changed.

recipe     reads, summarizes, writes and prunes
documents  files, pages and rows as documents
html       the text of a page
chunking   documents that are longer than the context
work       the parts of one document, level by level
prompts    prompt templates
manifest   what was summarized, from what and with what
forecast   the stages before anything has run
"""
