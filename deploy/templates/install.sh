#!/bin/sh
# Run as root in this folder, once the keys are made, and at any later time. It makes the accounts, gives each what is
# its own, closes Flower's port on loopback to all others, and installs the units, which it does not start.
# `install.sh modes`, as in a container, gives the files their owners and modes, and does no more.
# The account shufl can write to this folder. So what lies here is read, and gets its modes, with that account's rights,
# and root follows no link and no second name of a file. What root reads later is copied to /etc. For the same reason,
# whoever no longer trusts that account takes this file, the units (*.service), nginx.conf and nftables.conf anew, as
# `shufl provision` made them, or has `shufl doctor` compare them with its release: root installs what lies here.
set -eu
cd "$$(dirname "$$0")"
here=$$(pwd -P)
what=$${1:-all}

fail() {
    echo "install.sh: $$1" >&2
    exit 1
}

as_shufl() {
    setpriv --reuid=shufl --regid=shufl --clear-groups "$$@"
}

enter() {  # a folder of this one, and none that a link leads to
    cd "$$1"
    [ "$$(pwd -P)" = "$$here/$$1" ] || fail "$$1 is a link"
}

copy() {  # what the account can read, to where root reads it
    text=$$(as_shufl cat "$$1")
    printf '%s\n' "$$text" | install -D -m 644 /dev/stdin "$$2"
}

if [ "$$what" = all ]; then
    getent group shufl > /dev/null || groupadd --system shufl
    for name in shufl shufl-flower shufl-app; do
        [ "$$name" = shufl ] || [ -f node.toml ] || continue
        id "$$name" > /dev/null 2>&1 || useradd --system --gid shufl --shell /usr/sbin/nologin "$$name"
    done
fi

# Where fs.protected_hardlinks is 0, an account can give a second name to a file of root's.
second=$$(find . -path ./.venv -prune -o -type f -links +1 -print)
[ -z "$$second" ] || fail "a file here has a second name: find . -path ./.venv -prune -o -type f -links +1 -print"
chown shufl:shufl .
chmod u=rwx,g=,o= .
for each in ./* ./.[!.]*; do
    case "$$each" in ./.venv | ./node.sock) continue ;; esac
    [ ! -f node.toml ] || case "$$each" in ./flower | ./app) continue ;; esac
    [ -e "$$each" ] && [ ! -L "$$each" ] || continue
    chown -R shufl:shufl "$$each"
    as_shufl chmod -R u=rwX,g=,o= "$$each"
done
(
    enter .venv
    owner=$$(stat -c %u .)
    [ "$$owner" = 0 ] || [ "$$owner" = "$${SUDO_UID:-0}" ] || fail ".venv is neither root's nor yours: make it anew"
    chown -R root:root .
    chmod -R u=rwX,go=rX .
)
if [ -f node.toml ]; then  # Flower's two accounts have what is theirs, and enter the socket
    as_shufl chmod g=x . keys
    as_shufl chmod g=r keys/flower-authority.pem
    (
        enter keys
        chown -h shufl-flower flower.key
    )
    mkdir -p -m 700 flower app
    chown -R shufl-flower:shufl flower
    chown -R shufl-app:shufl app
fi
[ "$$what" = all ] || exit 0

umask 022  # `shufl doctor` reads what is installed
if [ -f nftables.conf ]; then  # now, and whenever this machine starts
    copy nftables.conf /etc/shufl/$prefix.nft
    nft -f /etc/shufl/$prefix.nft
    grep -qsF /etc/shufl/$prefix.nft /etc/nftables.conf || echo 'include "/etc/shufl/$prefix.nft"' >> /etc/nftables.conf
    systemctl enable nftables
fi
# nginx of Debian: a server's file belongs into the http block, those of all shufflers into one stream block.
[ ! -f server.toml ] || copy nginx.conf /etc/nginx/conf.d/$prefix.conf
if [ -f shuffler.toml ]; then
    rm -f /etc/nginx/modules-enabled/99-$prefix.conf  # of shufl 0.1.0
    mkdir -p /etc/nginx/shufl /etc/nginx/modules-enabled
    text=$$(as_shufl sed '/^stream {$$/d; /^}$$/d' nginx.conf)
    printf '%s\n' "$$text" > /etc/nginx/shufl/$prefix.conf
    echo 'stream { include /etc/nginx/shufl/*.conf; }' > /etc/nginx/modules-enabled/99-shufl.conf
fi
if [ ! -f node.toml ]; then  # Debian's nginx stays down once it has failed
    mkdir -p /etc/systemd/system/nginx.service.d
    printf '[Service]\nRestart=on-failure\nRestartSec=5\n' > /etc/systemd/system/nginx.service.d/shufl.conf
fi
for each in $prefix-*.service; do
    copy "$$each" "/etc/systemd/system/$$each"
done
systemctl daemon-reload
