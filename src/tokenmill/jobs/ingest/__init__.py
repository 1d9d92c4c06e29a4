"""Job files into the store.

submit: one file.  background: stores the rest while the first jobs run.  job_file, parsing, line: lines to rows, in
several processes.  identity: what makes two jobs the same.  reschedule: a new deadline or priority for a batch.
"""
