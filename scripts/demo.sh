#!/usr/bin/env bash
# The demo from nothing: packages, an optimised build, then kvshard-demo with the options given here.
#   scripts/demo.sh [options]     scripts/demo.sh --help lists them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Lets ccache find what another checkout compiled.
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1

scripts/setup.sh
preset=release
if command -v nvcc > /dev/null && [[ -e /dev/nvidia0 ]]; then preset=cuda; fi
echo "== build: preset $preset, in build/$preset (a first build takes minutes)"
cmake --preset "$preset" > /dev/null
cmake --build --preset "$preset" --target kvshard-demo --parallel "$(nproc)" | tail -n 1
echo "== kvshard-demo $*"
exec "build/$preset/tools/kvshard-demo" "$@"
