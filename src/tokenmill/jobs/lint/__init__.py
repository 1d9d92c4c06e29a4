"""Lint of job files: finds what prevents prompt reuse, estimates its cost, and fixes what can be fixed safely.

run            `Lint`: takes lines one by one and returns a report
parts          splits a prompt into tools and messages
variable_text  finds times, ids and numbers in texts
spellings      variants of a prompt without some of these
costs          bytes to compute, with and without reuse
prefixes       prefixes that are nearly shared
differences    shows where two jobs differ
tokens         token counts, measured or estimated
fix            makes equivalent tools and system messages identical
report         findings, their titles and advice
"""
