#!/bin/sh
# What `make demo` runs: what this machine is, what a real small model is, what a trillion-parameter one is and needs.
set -eu

say() { printf "\n$ %s\n" "$*" >&2; }

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

say tokenmill probe
tokenmill probe

say tokenmill models pull smollm2
model=$(tokenmill models pull smollm2)
echo "$model"

say "tokenmill inspect $model"
tokenmill inspect "$model"

say tokenmill models ghost kimi-k2.5:Q4_K_S -o kimi.gguf
tokenmill models ghost kimi-k2.5:Q4_K_S -o "$folder/kimi.gguf"

say tokenmill inspect kimi.gguf
tokenmill inspect "$folder/kimi.gguf"

say tokenmill plan kimi-k2.5:Q4_K_S --machine epyc-9175f --context 32768 --explain
tokenmill plan kimi-k2.5:Q4_K_S --machine epyc-9175f --context 32768 --explain
