#!/bin/sh
# Run as root in this folder, once the keys are made, and at any later time. It makes the accounts, gives each what is
# its own, closes Flower's port on loopback to all others, and installs the units, which it does not start.
# `install.sh modes`, as in a container, gives the files their owners and modes, and does no more.
# What root reads later is copied to /etc: the account shufl can write to this folder. For the same reason, whoever no
# longer trusts that account runs this file as `shufl provision` made it, and not the one that lies here.
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

chown shufl:shufl .
chmod u=rwx,g=,o= .
for each in ./* ./.[!.]*; do
    case "$$each" in ./.venv | ./node.sock) continue ;; esac
    [ ! -f node.toml ] || case "$$each" in ./flower | ./app) continue ;; esac
    [ -e "$$each" ] || continue
    chown -R shufl:shufl "$$each"
    chmod -R u=rwX,g=,o= "$$each"
done
chown -R root:root .venv
chmod -R u=rwX,go=rX .venv
if [ -f node.toml ]; then  # Flower's two accounts have what is theirs, and enter the socket
    chmod g=x . keys
    chmod g=r keys/flower-authority.pem
    chown shufl-flower keys/flower.key
    mkdir -p -m 700 flower app
    chown -R shufl-flower:shufl flower
    chown -R shufl-app:shufl app
fi
[ "$$what" = all ] || exit 0

if [ -f nftables.conf ]; then  # now, and whenever this machine starts
    install -D -m 644 nftables.conf /etc/shufl/$prefix.nft
    nft -f /etc/shufl/$prefix.nft
    grep -qsF /etc/shufl/$prefix.nft /etc/nftables.conf || echo 'include "/etc/shufl/$prefix.nft"' >> /etc/nftables.conf
    systemctl enable nftables
fi
# nginx of Debian: a server's file belongs into the http block, those of all shufflers into one stream block.
[ ! -f server.toml ] || install -m 644 nginx.conf /etc/nginx/conf.d/$prefix.conf
if [ -f shuffler.toml ]; then
    rm -f /etc/nginx/modules-enabled/99-$prefix.conf  # of shufl 0.1.0
    mkdir -p /etc/nginx/shufl /etc/nginx/modules-enabled
    sed '/^stream {$$/d; /^}$$/d' nginx.conf > /etc/nginx/shufl/$prefix.conf
    echo 'stream { include /etc/nginx/shufl/*.conf; }' > /etc/nginx/modules-enabled/99-shufl.conf
fi
install -m 644 ./*.service /etc/systemd/system/
systemctl daemon-reload
