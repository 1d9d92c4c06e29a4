#!/bin/sh
# A teacher's answers to five prompts, two of each, and the files that trainers read.
set -eu
here=$(dirname "$0")
out=${1:-.}
tokenmill distill "$here/prompts.jsonl" -o "$out/teacher.parquet" --samples 2 --max-tokens 400 --top-logprobs 20 --dry-run
tokenmill distill "$here/prompts.jsonl" -o "$out/teacher.parquet" --samples 2 --max-tokens 400 --top-logprobs 20
tokenmill export "$out/teacher.parquet" --to messages -o "$out/train.jsonl" --check
tokenmill export "$out/teacher.parquet" --to parquet -o "$out/train.parquet" --check
