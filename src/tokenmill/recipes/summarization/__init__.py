"""`tokenmill summarize`: a summary of every document that is new or has changed.

recipe     reads, summarizes, writes and prunes
documents  reads documents from files, pages and tables
html       the text of a page
chunking   documents that are longer than the context
work       the state of one document: its parts, level by level
prompts    prompt templates
manifest   the state of each document, and the inputs of its summary
forecast   the stages for a forecast
"""
