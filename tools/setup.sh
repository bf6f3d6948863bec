#!/usr/bin/env bash
# Make .venv with the pinned CPU builds that the demo and the tests use.
# Every package is pinned and installed with --no-deps, so that no resolver can replace the CPU
# build of torch or pull an accelerator's libraries.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

find_python() {
    for name in ${PYTHON:-python3.11 python3 python3.12 python3.13}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "isomodels needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2
    exit 2
}

# Byte code is made at the end, on all cores, since pip compiles on one.
install() { .venv/bin/python -m pip install -qq --no-compile "$@"; }

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    "$python" -m venv --clear .venv
fi
echo "Installing the pinned packages into .venv (one to three minutes the first time)"
if ! install --no-deps -r requirements/ci-torch.txt 2>/dev/null; then
    echo "torch 2.13.0+cpu is not on offer here: installing the ordinary torch 2.13.0"
    install -c requirements/ci-hosts.txt "torch==2.13.0"
fi
install --no-deps -r requirements/ci-hosts.txt -r requirements/ci-dev.txt
install --no-deps --no-build-isolation ./tools/vllm_cpu_stub
install --no-deps --no-build-isolation -e .
# Some packages ship templates that are no valid Python: that is no reason to stop.
.venv/bin/python -m compileall -qq -j 0 .venv/lib || true
