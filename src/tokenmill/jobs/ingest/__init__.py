"""Stores job files as batches.

submit: stores a file.  background: stores the rest of a file while its first jobs run.  job_file, parsing, line: parse
lines, in several processes.  identity: identity and prefix key of a job.  reschedule: new deadline or priority.
"""
