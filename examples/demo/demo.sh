#!/usr/bin/env bash
# Measure this machine, plan a pipeline for a small GPT, predict its step, train it on real text, compare.
# Measurements and runs stay in this folder (runs/).
set -euo pipefail
cd "$(dirname "$0")"
PYTHON=${PYTHON:-python3}
case "$PYTHON" in /*) ;; */*) PYTHON="$OLDPWD/$PYTHON" ;; esac
export WEFT_HOME=${WEFT_HOME:-$PWD/runs/home}

weft() {
    printf '\n$ weft %s\n' "$*"
    "$PYTHON" -m weft "$@"
}

weft measure gpt-1m --sequence 256
weft plan demo.toml
run=runs/$(date +%Y-%m-%d-%H%M%S)
weft train demo.toml --directory "$run"
weft compare "$run"
