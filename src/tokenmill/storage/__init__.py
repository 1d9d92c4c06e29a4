"""File formats shared by all packages.

atomic     whole-file replacement that survives crashes
lines      numbered lines of plain and compressed files
rows       tables of rows in JSONL, CSV, TSV and Parquet
json_text  JSON in its stored form, and a parser with readable errors
"""
