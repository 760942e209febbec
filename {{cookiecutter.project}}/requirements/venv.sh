#!/bin/sh
# Makes the environment from the locks, brings it to what they say now, or leaves it alone. Called by `make setup`.
#
#   VENV         where (required)
#   DEVICE       cpu or cuda; default: what VENV is now, else cpu
#   PYTHON       which Python; default: the first that fits
#   TORCH_INDEX  index of torch's CPU wheels (required for cpu)
#   INSTALLER    uv or pip; default: uv where it is installed
#   LOCKS        the purposes of the locks; default: all, which are train run dev server
#   QUIET=1      say nothing when there is nothing to do
#   LOCKS_ONLY=1 leave the project itself out
#
# A stamp is written last and removed first, so an interrupted set-up never passes for a whole one.
set -eu

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 2
}

root=$(cd "$(dirname "$0")/.." && pwd)
locks_stamp=$VENV/.locks project_stamp=$VENV/.project log=$VENV/setup.log

if [ -z "${DEVICE:-}" ]; then
    DEVICE=$(sed -n 's/^device //p' "$locks_stamp" 2>/dev/null || true)
    DEVICE=${DEVICE:-cpu}
fi
case $DEVICE in
    cpu) train="torch-cpu.txt train-cpu.txt" ;;
    cuda) train=train-cuda.txt ;;
    *) fail "DEVICE=$DEVICE is not known: use DEVICE=cpu or DEVICE=cuda" ;;
esac
locks=''
for purpose in ${LOCKS:-train run dev server}; do
    case $purpose in
        train) locks="$locks $train" ;;
        run | dev | server) locks="$locks $purpose.txt" ;;
        *) fail "LOCKS=$LOCKS: $purpose is not known: use some of train run dev server" ;;
    esac
done
if [ "$(uname -sm)" != "Linux x86_64" ]; then
    fail "the locks are for Linux x86_64, this is $(uname -sm): use the container (make image)"
fi
if [ -e "$VENV" ] && [ ! -f "$VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$VENV")" ]; then
    fail "$VENV exists and is no Python environment: remove it, or choose another with VENV=DIR"
fi

installer=${INSTALLER:-$(command -v uv >/dev/null 2>&1 && echo uv || echo pip)}
case $installer in
    pip) ;;
    uv) command -v uv >/dev/null 2>&1 || fail "INSTALLER=uv: there is no uv here; install it, or use INSTALLER=pip" ;;
    *) fail "INSTALLER=$installer is not known: use INSTALLER=uv or INSTALLER=pip" ;;
esac

# One set-up at a time; pip of one that was killed holds the lock until it ends.
mkdir -p "$(dirname "$VENV")"
if command -v flock >/dev/null 2>&1; then
    exec 9<"$(dirname "$VENV")"
    flock --nonblock 9 || {
        echo "another set-up is at work on $VENV: waiting for it"
        flock 9
    }
fi

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

# Sets `python`; a command that exists but does not run (a shim without its Python) is passed over.
choose_python() {
    seen='' no_venv=''
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
        if ! command -v "$candidate" >/dev/null 2>&1; then
            seen="$seen, no $candidate"
        elif ! version=$(version_of "$candidate"); then
            seen="$seen, $candidate does not run"
        else
            case $version in
                3.11 | 3.12 | 3.13)
                    if has_venv "$candidate"; then
                        python=$candidate
                        return
                    fi
                    seen="$seen, $candidate is $version without venv" no_venv=${no_venv:-$version}
                    ;;
                *) seen="$seen, $candidate is $version" ;;
            esac
        fi
    done
    if [ -n "$no_venv" ]; then
        fail "Python $no_venv cannot make environments: its venv and ensurepip are missing (found:${seen#,}).
Install them (on Debian and Ubuntu: apt install python$no_venv-venv) and run this again."
    fi
    fail "wanted Python 3.11, 3.12 or 3.13 with venv; found:${seen#,}.
Install one (on Debian and Ubuntu: apt install python3 python3-venv), or name it: make setup PYTHON=/path/to/python"
}

# Runs a command with its output in the log; on a terminal, shows that it moves.
job='' count=1
trap '[ -z "$job" ] || kill "$job" 2>/dev/null; exit 130' INT TERM HUP
step() {
    what=$1
    shift
    printf '%s\n' "$what"
    "$@" >>"$log" 2>&1 &
    job=$!
    seconds=0
    while kill -0 "$job" 2>/dev/null; do
        if [ -t 1 ] && [ "$seconds" -gt 0 ]; then
            printf '\r  %s s, %s of %s fetched ' "$seconds" "$(grep -c '^Collecting ' "$log" || true)" "$count"
        fi
        sleep 1
        seconds=$((seconds + 1))
    done
    [ ! -t 1 ] || printf '\r\033[K'
    wait "$job" || {
        tail -n 5 "$log" | cut -c 1-300 >&2
        fail "$what: failed; the whole output is in $log"
    }
    job=''
}

# Bytecode for all packages would double the time; Python writes what it needs at the first import.
pip_install() {
    "$VENV/bin/python" -m pip install --no-input --disable-pip-version-check --no-deps --no-compile "$@"
}

# The packages of all locks but torch's. Hashes decide what is installed, so every index may be asked for every package.
lock_install() {
    set --
    for lock in $locks; do
        [ "$lock" = torch-cpu.txt ] || set -- "$@" -r "$root/requirements/$lock"
    done
    if [ "$installer" = uv ]; then
        "$VENV/bin/python" "$root/requirements/with_uv.py" install --no-deps --no-build-isolation --require-hashes \
            --index-strategy unsafe-best-match "$@"
    else
        # an older pip would install a source package without a record of its files, which a run asks for
        pip_install --require-hashes --no-build-isolation --use-pep517 "$@"
    fi
}

# shellcheck disable=SC2086  # $locks is a list of names
key=$(cd "$root/requirements" && cat $locks | sha256sum | cut -c 1-64)
wanted="device $DEVICE
locks $key"

whole() {
    [ "$(cat "$locks_stamp" 2>/dev/null)" = "$wanted" ] && now=$(version_of "$VENV/bin/python") || return 1
    [ -z "${PYTHON:-}" ] || [ "$now" = "$(version_of "$PYTHON")" ]
}

# Whether only the locks have changed since all of them were installed here.
outdated() {
    [ "$(sed -n 1p "$locks_stamp" 2>/dev/null)" = "device $DEVICE" ] && [ "$(version_of "$VENV/bin/python")" = "$version" ]
}

# The packages here that no lock names; the project itself is installed again later.
unlocked() {
    # shellcheck disable=SC2086
    (cd "$root/requirements" && cat $locks) | sed -n 's/^\([a-z0-9][a-z0-9.-]*\)==.*/\1/p; $a pip' >"$VENV/locked.txt"
    "$VENV/bin/python" -m pip list --disable-pip-version-check --format=freeze | sed 's/[ =].*//' |
        tr 'A-Z_.' 'a-z--' | grep -vxFf "$VENV/locked.txt"
}

install_locks() {
    choose_python
    work=making
    if outdated; then work=updating; fi
    rm -f "$locks_stamp" "$project_stamp"
    # shellcheck disable=SC2086
    count=$(cd "$root/requirements" && cat $locks | grep -o '^[a-z0-9].*==' | sort -u | wc -l)
    printf '%s %s for DEVICE=%s with %s (%s), %s packages by %s\n' \
        "$work" "$VENV" "$DEVICE" "$python" "$version" "$count" "$installer"
    if [ "$work" = making ]; then
        "$python" -m venv --clear "$VENV" || fail "$python could not make $VENV (above)"
    fi
    # Packages that come as source are built with the locked setuptools, so that goes first: pip's own build
    # environments would take the newest one, unhashed.
    # shellcheck disable=SC2086
    (cd "$root/requirements" && cat $locks) | sed -n '/^setuptools==/,/# via/{p;/# via/q;}' >"$VENV/setuptools.txt"
    if [ -s "$VENV/setuptools.txt" ]; then
        step "installing setuptools" pip_install --require-hashes -r "$VENV/setuptools.txt"
    fi
    if [ "${locks#*torch-cpu.txt}" != "$locks" ]; then
        # The extra index serves this one package: given to the whole lock, it would be asked for every package.
        # uv stops where an index cannot be reached, even if torch lies elsewhere; pip goes on.
        step "installing the CPU build of torch" \
            pip_install --require-hashes --extra-index-url "$TORCH_INDEX" -r "$root/requirements/torch-cpu.txt"
    fi
    step "installing the locked packages" lock_install
    if [ "$work" = updating ] && extra=$(unlocked); then
        # shellcheck disable=SC2086
        step "removing what no lock names any more" \
            "$VENV/bin/python" -m pip uninstall --yes --disable-pip-version-check $extra
    fi
    printf '%s\n' "$wanted" >"$locks_stamp.new"
    mv "$locks_stamp.new" "$locks_stamp"
}

# The project itself, editable: again when it moved or its pyproject.toml changed.
install_project() {
    rm -f "$project_stamp"
    step "installing the project" pip_install --no-build-isolation --editable "$root"
    step "checking that the locks hold what pyproject.toml asks for (if not: make lock)" "$VENV/bin/python" -m pip check
    printf '%s\n' "$project" >"$project_stamp"
}

changed=''
if ! whole; then
    install_locks
    changed=1
fi
if [ -z "${LOCKS_ONLY:-}" ]; then
    project="$root $(sha256sum <"$root/pyproject.toml")"
    if [ "$(cat "$project_stamp" 2>/dev/null)" != "$project" ]; then
        install_project
        changed=1
    fi
fi
if [ -n "$changed" ] || [ -z "${QUIET:-}" ]; then
    printf '%s is ready: DEVICE=%s, Python %s\n' "$VENV" "$DEVICE" "$(version_of "$VENV/bin/python")"
fi
