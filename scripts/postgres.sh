#!/bin/sh
# Prints the folder of initdb and postgres; installs Debian's package if there is none and the user is root.
set -eu

fail() {
    echo "error: $1" >&2
    echo "hint: $2" >&2
    exit 1
}

whole() {
    [ -x "$1/initdb" ] && [ -x "$1/postgres" ]
}

found() {
    # Debian installs them outside PATH, in one folder per version; the last one is the newest.
    newest=
    for folder in /usr/lib/postgresql/*/bin; do
        whole "$folder" && newest=$folder
    done
    [ -n "$newest" ] || newest=$(dirname "$(command -v initdb || echo none/none)")
    whole "$newest" && echo "$newest"
}

if [ -n "${TOKENMILL_POSTGRES:-}" ]; then
    whole "$TOKENMILL_POSTGRES" ||
        fail "TOKENMILL_POSTGRES has no initdb and postgres: $TOKENMILL_POSTGRES" "set it to the folder that contains them"
    echo "$TOKENMILL_POSTGRES"
    exit 0
fi
found && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
    fail "PostgreSQL is not installed" "sudo apt-get install postgresql, or TOKENMILL_POSTGRES=/path/to/bin"
echo "installing postgresql" >&2
# Prevents Debian's package from starting a server.
mkdir -p /etc/postgresql-common
[ -e /etc/postgresql-common/createcluster.conf ] ||
    echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.conf
{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends postgresql; } >&2 ||
    fail "apt-get could not install postgresql" "read its output above"
found || fail "postgresql was installed but its programs are not there" "look in /usr/lib/postgresql"
