#!/usr/bin/env bash
# Installs a build of kvshard, then builds and runs a stranger's project against what was installed.
# For a shared library, also looks at what it exports and what it needs.
#   install_test.sh BUILD_DIR WORK_DIR CXX
set -euo pipefail
build=$1 work=$2 cxx=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

rm -rf "$work"
mkdir -p "$work"
cmake --install "$build" --prefix "$work/prefix" > "$work/install.log"
cmake -S "$here/consumer" -B "$work/consumer" -G Ninja -DCMAKE_CXX_COMPILER="$cxx" \
  -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_BUILD_TYPE=Debug > "$work/configure.log"
cmake --build "$work/consumer"
"$work/consumer/consumer"

if grep -rlE '#\s*include\s*[<"](spdlog|fmt|nlohmann|ucp|ucs|cuda)' "$work/prefix/include"; then
  echo "installed headers bring headers of other projects"
  exit 1
fi
library=$(find "$work/prefix" -name 'libkvshard.so.*' -type f)
if [[ -n $library ]]; then "$here/check_exports.sh" "$library"; fi
