#!/bin/sh
# The checks that need a GPU, on a machine with Python, torch and no network. They install nothing outside this folder.
#
#   ./run.sh              lists the parts
#   ./run.sh PART...      measures them one after another into results/, each within eight minutes
#   ./run.sh all          measures all parts; patterns such as 'bits-*' work, too
#   ./run.sh table        makes a table of what is in results/
#   ./run.sh --help       says the rest
#
# PYTHON=... names the Python that has torch; default: python3.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python3}
tag=$("$PYTHON" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
site=$here/site/$tag
if [ ! -d "$here/wheels/$tag" ]; then
    there=$(cd "$here/wheels" && echo cp*)
    echo "$PYTHON is $tag, one of $there wanted: name another with PYTHON=..." >&2
    exit 2
fi
if [ ! -d "$site" ]; then
    rm -rf "$site.part"
    for wheel in "$here/wheels/$tag"/*.whl; do
        "$PYTHON" -m zipfile -e "$wheel" "$site.part" # pip may be missing, and these need no more
    done
    mv "$site.part" "$site"
fi
# A training refuses other values of these than it sets itself.
unset PYTHONHASHSEED CUBLAS_WORKSPACE_CONFIG OMP_NUM_THREADS MKL_NUM_THREADS
PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} exec "$PYTHON" "$here/gpu.py" "$@"
