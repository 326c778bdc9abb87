#!/usr/bin/env bash
# Builds kvshard as a shared library, and what is installed with it, as a packager would, then runs
# install_test.sh on it.
#   install_shared_test.sh SOURCE_DIR WORK_DIR CXX
set -euo pipefail
source=$1 work=$2 cxx=$3
launcher=$(command -v ccache || true)
cmake -S "$source" -B "$work/build" -G Ninja -DBUILD_SHARED_LIBS=ON -DCMAKE_CXX_COMPILER="$cxx" \
  ${launcher:+-DCMAKE_CXX_COMPILER_LAUNCHER="$launcher"} -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O0 \
  -DKVSHARD_ENABLE_CUDA=OFF -DKVSHARD_BUILD_TESTS=OFF -DKVSHARD_BUILD_TOOLS=ON -DKVSHARD_BUILD_BENCH=OFF \
  -DCMAKE_INSTALL_PREFIX=/usr -DCMAKE_SHARED_LINKER_FLAGS=-Wl,-z,defs
cmake --build "$work/build" --target kvshard-all
"$(dirname "${BASH_SOURCE[0]}")/install_test.sh" "$work/build" "$work/install" "$cxx"
