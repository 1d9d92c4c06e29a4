#!/bin/sh
# Prints the path of a Chromium; installs Debian's package if there is none and the user is root.
set -eu

fail() {
    echo "error: $1" >&2
    echo "hint: $2" >&2
    exit 1
}

found() {
    for name in chromium chromium-browser google-chrome-stable google-chrome; do
        command -v "$name" && return 0
    done
    return 1
}

if [ -n "${TOKENMILL_BROWSER:-}" ]; then
    [ -x "$TOKENMILL_BROWSER" ] || fail "TOKENMILL_BROWSER is not an executable file: $TOKENMILL_BROWSER" "set it to a Chromium or Chrome"
    echo "$TOKENMILL_BROWSER"
    exit 0
fi
found && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
    fail "no Chromium is on PATH" "sudo apt-get install chromium, or TOKENMILL_BROWSER=/path/to/chrome"
echo "installing chromium" >&2
{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium; } >&2 ||
    fail "apt-get could not install chromium" "read its output above"
found || fail "chromium was installed but is not on PATH" "check PATH"
