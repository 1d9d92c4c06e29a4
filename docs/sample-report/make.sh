#!/bin/sh
# Makes report.html and README.md next to this file and img/report.png: a small real model, measured on this
# machine by the commands themselves, in a state folder of its own. Wants a quiet machine for about ten minutes.
# Options after the script's name go to tune, such as --busy where the machine is never quiet.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
docs=$(dirname -- "$here")
root=$(dirname -- "$docs")
PATH="$root/.venv/bin:$PATH"
browser=$(sh "$root/scripts/browser.sh")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export XDG_STATE_HOME="$folder/state"
cd "$folder"

say() { printf '\n$ %s\n' "$*" >&2; "$@" >&2; }

tokenmill models pull smollm2 --json >pulled.json
python3 -c 'import json, os; path = json.load(open("pulled.json"))["path"]; os.symlink(path, os.path.basename(path))'
model=$(ls ./*.gguf)
model=${model#./}
cp "$root/examples/jobs/notes.jsonl" .

say tokenmill probe --measure -o machine.toml
echo 'machine = "machine.toml"' >tokenmill.toml
say tokenmill tune "$model" --context 2048 --trial-seconds 3 "$@"
say tokenmill bench "$model" --context 2048 --what sweep,threads --depth 1536 --step 256 --tokens 32
say tokenmill run notes.jsonl --output results.jsonl --model "$model" --context 2048
say tokenmill soak "$model" --context 2048 --step 256 || [ $? = 3 ]
say tokenmill qualify "$model" --quick
say tokenmill report "$model" --context 2048 -o report.html
say tokenmill report "$model" --context 2048 -o report.md

cp report.html "$here/report.html"
cp report.md "$here/README.md"
mkdir -p "$docs/img"
"$browser" --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking \
    --disable-component-update --disable-sync --user-data-dir="$folder/browser" --hide-scrollbars \
    --window-size=1280,1560 --screenshot="$docs/img/report.png" "file://$folder/report.html" 2>/dev/null
ls -l "$here"/report.html "$here/README.md" "$docs/img/report.png" >&2
