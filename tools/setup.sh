#!/usr/bin/env bash
# Make .venv from the project's files: a line for each stage, all else in .venv/setup.log, whose end
# is shown where a stage fails. The second run is instant: a stamp holds the checksum of what the
# environment was made from.
#
#   PYTHON=python3.12 tools/setup.sh     use this interpreter
#   TORCH=2.12.0      tools/setup.sh     use this release of torch (2.11 <= release < 2.15)
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.setup-stamp
log=$venv/setup.log
torch=${TORCH:-2.13.0}
cpu_index=https://download.pytorch.org/whl/cpu

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$@" >&2; exit 1; }
fail_with_log() { tail -n 15 "$log" >&2; fail "$1; the whole log is $log"; }
now() { { cat pyproject.toml tools/setup.sh; pwd; printf '%s\n' "$torch"; } | cksum; }

if [ -x "$venv/bin/oxplow" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(now)" ]; then
    say "$venv is up to date"
    exit 0
fi

# --- 1. an interpreter -----------------------------------------------------------------------
fits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))'
python=
for name in ${PYTHON:-} "$venv/bin/python" python3 python3.12 python3.11; do
    # Asked, not only looked for: a version manager's shim may exist and still refuse.
    if "$name" -c "$fits" >/dev/null 2>&1; then python=$name; break; fi
done
[ -n "$python" ] || fail "no Python 3.11 or 3.12 was found." \
    "Debian, Ubuntu: apt-get install python3.11 python3.11-venv" \
    "Fedora: dnf install python3.12    macOS: brew install python@3.12" \
    "or name one: PYTHON=/path/to/python3.12 make setup"
say "[1/4] $("$python" --version) from $("$python" -c 'import sys; print(sys.executable)')"

# --- 2. a virtual environment ----------------------------------------------------------------
if ! "$venv/bin/python" -c "$fits" >/dev/null 2>&1; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || fail \
        "Python $version has no venv module; one system package is missing." \
        "Debian, Ubuntu: apt-get install python$version-venv"
    say "[2/4] making $venv"
    rm -rf "$venv"
    "$python" -m venv "$venv"
else
    say "[2/4] $venv is there already"
fi
rm -f "$stamp"
: >"$log"

# All of pip's output goes to the log; a terminal sees the current package, in one line that goes.
shows=0
[ -t 1 ] && shows=1
pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check install --progress-bar off "$@" 2>&1 |
        tee -a "$log" |
        awk -v shows="$shows" '
            shows && /^ *(Collecting|Building|Installing)/ {
                line = $0; sub(/^ +/, "", line)
                printf "\r\033[K  %s", substr(line, 1, 70); fflush()
            }
            END { if (shows) printf "\r\033[K" }'
}

# --- 3. torch --------------------------------------------------------------------------------
accelerator() {
    if nvidia-smi -L >/dev/null 2>&1; then echo cuda
    elif [ -e /dev/kfd ]; then echo rocm
    elif compgen -G '/dev/davinci[0-9]*' >/dev/null; then echo npu
    else echo none; fi
}
in_range='
from importlib.metadata import version
release = tuple(int(part) for part in version("torch").split("+")[0].split(".")[:2])
raise SystemExit(not (2, 11) <= release < (2, 15))'
found=$(accelerator)
if "$venv/bin/python" -c "$in_range" >/dev/null 2>&1 && [ -z "${TORCH:-}" ]; then
    say "[3/4] torch in the environment is in range: kept"
elif [ "$found" = cuda ]; then
    say "[3/4] torch $torch for the CUDA device that was seen (about 3 GB)"
    pip "torch==$torch" || fail_with_log "torch could not be installed"
else
    [ "$found" = none ] || say "[3/4] a $found device was seen: its torch comes from its vendor;" \
        "install that in $venv first, setup keeps it. The CPU build follows."
    say "[3/4] torch $torch, CPU build: no accelerator is used"
    # First what this site keeps on disk (pip's find-links), then the CPU index, then the default
    # index, whose Linux wheels bring CUDA along: larger, and just as correct on a CPU.
    if [ "$(uname -s)" != Linux ]; then
        pip "torch==$torch" || fail_with_log "torch could not be installed"
    elif pip --no-index --no-deps "torch==$torch" >/dev/null 2>&1; then
        : # from the wheels that this machine keeps
    elif pip --no-deps --retries 0 --timeout 20 --index-url "$cpu_index" "torch==$torch"; then
        :
    else
        say "  the CPU index did not answer; taking the default build (several GB, a few minutes)"
        pip "torch==$torch" || fail_with_log "torch could not be installed"
    fi
fi

# --- 4. the project and its tools ------------------------------------------------------------
say "[4/4] oxplow, its libraries, and the tools for tests and lint"
pip --editable '.[test,dev]' || fail_with_log "the libraries could not be installed"
now >"$stamp"
say "done: $venv/bin/oxplow, in $SECONDS s"
