#!/bin/sh
# Summarises a few documents of a waterworks in its house style with a small model: a forecast, the summaries, and a
# second run after one document has changed. Everything is written to a temporary folder.
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

printf "\nthe next night, after a line was added to the notice:\n" >&2
echo "<p>The pool is closed on that day.</p>" >> docs/notice.html
summarize
