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
    if [ -f /site/site.tar ]; then  # with the account's rights: a link that is here leads to nothing of root's
        chown shufl:shufl .
        without=
        [ ! -d app ] || without="--exclude=./flower --exclude=./app"  # which belong to other accounts by now
        # shellcheck disable=SC2086
        setpriv --reuid=shufl --regid=shufl --clear-groups tar -x --skip-old-files $without < /site/site.tar
    fi
    sh install.sh modes
    ;;
start)
    eval "exec $(sed -n 's|^ExecStart=[^ ]*/||p' ./*-"$2.service")"
    ;;
*)
    exec "$@"
    ;;
esac
