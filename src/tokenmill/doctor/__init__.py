"""What keeps a machine from serving as fast as it could, and the exact command against each.

`gather` looks, `examine` judges; the checks are pure and know no files.
"""
