#!/bin/sh
# Makes the image's environment, /opt/venv, from the locks of the purposes in LOCKS, or adds them. Called by the Dockerfile.
# Bytecode is compiled last, from sources that have their date: it records that. One file of torch is for 3.12 only.
set -eu

VENV=/opt/venv LOCKS_ONLY=1 sh "$(dirname "$0")/venv.sh"
rm -f /opt/venv/setup.log /opt/venv/setuptools.txt /opt/venv/locked.txt
dated() {
    find /opt/venv \( -newermt "@$SOURCE_DATE_EPOCH" -o ! -newermt "@$((SOURCE_DATE_EPOCH - 1))" \) \
        -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
}
dated
/opt/venv/bin/python -m compileall -q --invalidation-mode timestamp -x py312_ /opt/venv/lib
dated
