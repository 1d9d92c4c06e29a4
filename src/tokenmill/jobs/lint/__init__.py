"""Lint of job files: what breaks the reuse of prompts, what it costs, and what can be fixed safely.

run            `Lint` takes lines one by one and reports
parts          a prompt in parts: tools, messages
variable_text  times, ids and numbers in texts
spellings      a prompt without some of these
costs          bytes to compute, with and without reuse
prefixes       prefixes that are nearly shared
differences    two jobs side by side
tokens         tokens, counted or estimated
fix            one spelling for tools and system messages that mean the same
report         findings and their words
"""
