#!/bin/sh
# What a container does with a site's folder, /srv/shufl, as `shufl provision` made it:
#   site install      unpacks /site/site.tar if there is one, and gives every file its owner and mode
#   site start NAME   runs what the unit *-NAME.service says
#   site COMMAND …    runs another command
set -eu
umask 077
case "$1" in
install)
    mkdir -p .venv  # install.sh names it; here shufl is in the image
    if [ -f /site/site.tar ]; then tar -xf /site/site.tar --skip-old-files; fi
    sh install.sh modes
    ;;
start)
    eval "exec $(sed -n 's|^ExecStart=[^ ]*/||p' ./*-"$2.service")"
    ;;
*)
    exec "$@"
    ;;
esac
