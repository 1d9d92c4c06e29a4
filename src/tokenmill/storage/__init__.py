"""Files on disk, for every other package.

atomic     whole-file replacement that survives crashes
lines      numbered lines of plain and compressed files
rows       tables of rows in JSONL, CSV, TSV and Parquet
json_text  JSON as it is stored, and parsed with errors for people
"""
