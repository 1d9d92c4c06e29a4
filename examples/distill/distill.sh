#!/bin/sh
# Collects two answers of a teacher to each of five prompts, and exports them for training libraries.
set -eu
here=$(dirname "$0")
out=${1:-.}
tokenmill distill "$here/prompts.jsonl" -o "$out/teacher.parquet" --samples 2 --max-tokens 400 --top-logprobs 20 --dry-run
tokenmill distill "$here/prompts.jsonl" -o "$out/teacher.parquet" --samples 2 --max-tokens 400 --top-logprobs 20
tokenmill export "$out/teacher.parquet" --to messages -o "$out/train.jsonl" --check
tokenmill export "$out/teacher.parquet" --to parquet -o "$out/train.parquet" --check
