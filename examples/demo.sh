#!/bin/sh
# Run by `make demo`: a small batch on a real model, the same command again, and a plan for a model with a trillion
# parameters. Results and state are written to a temporary folder. Ends with how to use tokenmill from here on.
set -eu

say() { printf "\n$ %s\n" "$*" >&2; }

jobs=$(dirname "$0")/jobs/notes.jsonl
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export XDG_STATE_HOME="$folder/state"

say tokenmill models pull smollm2
tokenmill models pull smollm2

say tokenmill plan smollm2 --context 4096 --sequences 8
tokenmill plan smollm2 --context 4096 --sequences 8 | sed '/^run:$/,$d'  # omits the server command

# 36 notes of a machine room log, each after the same handbook of 700 tokens; the jobs ask for a headline.
say tokenmill lint "$jobs"
tokenmill lint "$jobs"

say tokenmill run "$jobs" --output results.jsonl --context 4096
tokenmill run "$jobs" --output "$folder/results.jsonl" --context 4096

printf "\nfive of the results:\n" >&2
python3 - "$folder/results.jsonl" <<'SCRIPT'
import json, sys
for line in open(sys.argv[1], encoding="utf-8").readlines()[::8]:
    result = json.loads(line)
    print(result["custom_id"], result["response"]["body"]["choices"][0]["message"]["content"], sep="  ")
SCRIPT

printf "\nthe same command again: nothing is computed twice, and no engine is started:\n" >&2
tokenmill run "$jobs" --output "$folder/results.jsonl" --context 4096

say tokenmill status last
tokenmill status last

say tokenmill plan kimi-k2.5:Q4_K_S --machine epyc-9175f --context 32768
tokenmill plan kimi-k2.5:Q4_K_S --machine epyc-9175f --context 32768 | sed '/^run:$/,$d'

cat >&2 <<'NEXT'

tokenmill is installed in .venv. Put it on the PATH of this shell:

  . .venv/bin/activate

Then:

  tokenmill doctor                                             # what slows this machine down
  tokenmill plan MODEL.gguf                                    # does your model fit, and how fast will it be?
  tokenmill run jobs.jsonl -o results.jsonl --model MODEL.gguf # a batch of your own jobs
NEXT
