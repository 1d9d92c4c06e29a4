"""OpenAI's files and batches over HTTP, on the store of `tokenmill.jobs`.

routes: /v1/batches.  files, uploads: /v1/files.  schemas: their JSON.  result_files: input check and result files.
runner: the life cycle of a batch.  workers: assignment of batches to backends.
"""
