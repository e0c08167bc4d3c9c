#!/bin/sh
# Run as root in this folder, once the keys are made, and at any later time. It makes the accounts, gives each what is
# its own, closes Flower's port on loopback to all others, and installs the units, which it does not start.
# `install.sh modes`, as in a container, gives the files their owners and modes, and does no more.
set -eu
cd "$$(dirname "$$0")"
what=$${1:-all}
if [ "$$what" = all ]; then
    getent group shufl > /dev/null || groupadd --system shufl
    for name in shufl shufl-flower shufl-app; do
        [ "$$name" = shufl ] || [ -f node.toml ] || continue
        id "$$name" > /dev/null 2>&1 || useradd --system --gid shufl --shell /usr/sbin/nologin "$$name"
    done
fi

chown -R shufl:shufl .
chmod -R u=rwX,g=,o= .
if [ -f node.toml ]; then  # Flower's two accounts have what is theirs, and enter the socket
    chown -R root:root .venv
    chmod -R u=rwX,go=rX .venv
    chmod g=x . keys
    chmod g=r keys/flower-authority.pem
    chown shufl-flower keys/flower.key
    mkdir -p -m 700 flower app
    chown -R shufl-flower flower
    chown -R shufl-app app
fi
[ "$$what" = all ] || exit 0

if [ -f nftables.conf ]; then  # now, and whenever this machine starts
    nft -f nftables.conf
    grep -qsF '$folder/nftables.conf' /etc/nftables.conf || echo 'include "$folder/nftables.conf"' >> /etc/nftables.conf
    systemctl enable nftables
fi
# nginx of Debian: a server's file belongs into the http block, a shuffler's outside of it.
[ ! -f server.toml ] || ln -sfn $folder/nginx.conf /etc/nginx/conf.d/$prefix.conf
[ ! -f shuffler.toml ] || ln -sfn $folder/nginx.conf /etc/nginx/modules-enabled/99-$prefix.conf
cp ./*.service /etc/systemd/system/
systemctl daemon-reload
