"""OpenAI's files and batches over HTTP, on the store of `tokenmill.jobs`.

routes: /v1/batches.  files, uploads: /v1/files.  result_files: output and error files.  schemas: their JSON.
runner: checks, starts, expires and cancels batches.  workers: the engines that work on them.
"""
