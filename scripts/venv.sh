#!/bin/sh
# Creates .venv and installs the project into it: `sh scripts/venv.sh` what users need, `sh scripts/venv.sh dev` also what
# the tests and the documentation need. Needs python >= 3.11 and a package index, nothing else.
set -eu

fail() {
    echo "error: $1" >&2
    echo "hint: $2" >&2
    exit 1
}

[ -n "${PYTHON:-}" ] || fail "no python3 on PATH" "apt-get install python3 python3-venv"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$PYTHON is older than 3.11" "make PYTHON=/path/to/python3.11"

# Debian ships Python without ensurepip, which a virtual environment needs.
if ! "$PYTHON" -c 'import ensurepip' 2>/dev/null; then
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
        fail "$PYTHON cannot make virtual environments" "sudo apt-get install python3-venv"
    echo "installing python3-venv" >&2
    apt-get update -qq && apt-get install -qq -y python3-venv >/dev/null
fi

[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
echo "installing tokenmill into .venv" >&2
.venv/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
if [ "${1:-}" = dev ]; then
    .venv/bin/python -m pip install --quiet --editable '.[all]' --editable ./integrations/dagster-tokenmill --group dev
else
    .venv/bin/python -m pip install --quiet --editable .
fi
