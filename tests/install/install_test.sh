#!/usr/bin/env bash
# Installs a build of kvshard, then builds and runs strangers' projects against what was installed: in C++
# and in C, by CMake and by pkg-config. For a shared library, also looks at what it exports.
#   install_test.sh BUILD_DIR WORK_DIR CXX
set -euo pipefail
build=$1 work=$2 cxx=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

rm -rf "$work"
mkdir -p "$work"
cmake --install "$build" --prefix "$work/prefix" > "$work/install.log"
"$here/use_installed.sh" "$work/prefix" "$work" "$cxx"
