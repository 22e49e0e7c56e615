#!/bin/sh
# Makes sure that the tests have Redis's own programs: installs Debian's package where that may be done, else says what
# is missing and fails. Nothing is started: tests run servers of their own.
set -eu

is_complete() {
    command -v redis-server >/dev/null && command -v redis-cli >/dev/null && command -v openssl >/dev/null
}

is_complete && exit 0
fail() {
    echo "The tests need redis-server, redis-cli and openssl: $1" >&2
    exit 1
}
command -v apt-get >/dev/null || fail "install Redis 6.2 or newer and OpenSSL, there is no apt-get here"
if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || fail "as root, apt-get install redis-server openssl"
    exec sudo -n sh "$0"
fi

echo "Installing Debian's redis-server and openssl"
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    # 101: no service of a package that is being installed may start.
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
install() { apt-get install -y -q --no-install-recommends redis-server openssl >/dev/null; }
install || { apt-get update -q >/dev/null && install; } || fail "apt-get could not install them"
is_complete || fail "they are still missing after apt-get install"
