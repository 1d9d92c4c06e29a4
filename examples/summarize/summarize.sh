#!/bin/sh
# Summaries of a few documents of a waterworks, in its house style, on a small model: what it will take, the summaries,
# and the next night, on which one document has changed. Everything is written to a folder of its own and removed.
set -eu

say() { printf "\n$ %s\n" "$*" >&2; }

here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export XDG_STATE_HOME="$folder/state"
cp -r "$here/docs" "$folder/docs"
cd "$folder"

summarize() {
    say tokenmill summarize docs -o summaries --digest house-style.md --id-column id --max-tokens 96 --context 2048 "$@"
    tokenmill summarize docs -o summaries --digest "$here/house-style.md" --id-column id --max-tokens 96 --context 2048 "$@"
}

tokenmill models pull smollm2
summarize --dry-run
summarize
find summaries -type f | sort
cat summaries/minutes/2026-03-02.md.md

printf "\nthe next night, with one more line in the notice:\n" >&2
echo "<p>The pool is closed on that day.</p>" >> docs/notice.html
summarize
