#!/usr/bin/env bash
# Builds and runs strangers' projects against the kvshard that lies under PREFIX, in C++ and in C, by CMake
# and by pkg-config. Looks at what a shared library exports.
#   use_installed.sh PREFIX WORK_DIR CXX
set -euo pipefail
prefix=$1 work=$2 cxx=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# As for every test: see cmake/KvshardTargets.cmake.
export UCX_TLS=tcp UCX_MEM_EVENTS=n

library=$(find "$prefix" -name 'libkvshard.so.*' -type f)
if [[ -n $library ]]; then
  LD_LIBRARY_PATH=$(dirname "$library")
  export LD_LIBRARY_PATH
fi

projects=(consumer consumer_c)
with_exporter=$(find "$prefix" -name kvshard-prometheus.pc)
[[ -z $with_exporter ]] || projects+=(consumer_prometheus)
for project in "${projects[@]}"; do
  cmake -S "$here/$project" -B "$work/$project" -G Ninja -DCMAKE_CXX_COMPILER="$cxx" \
    -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Debug --no-warn-unused-cli > "$work/$project.log"
  cmake --build "$work/$project"
  "$work/$project/$project"
done

PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name kvshard.pc)")
export PKG_CONFIG_PATH
kind=()
[[ -n $library ]] || kind=(--static)
read -ra cflags <<< "$(pkg-config --cflags kvshard)"
read -ra libs <<< "$(pkg-config "${kind[@]}" --libs kvshard)"
cc -std=c11 -Wall -Wextra -Wpedantic -Werror "${cflags[@]}" "$here/consumer_c/main.c" "${libs[@]}" -o "$work/by_pkg_config"
"$work/by_pkg_config"
if [[ -n $with_exporter ]]; then
  read -ra cflags <<< "$(pkg-config --cflags kvshard-prometheus)"
  read -ra libs <<< "$(pkg-config "${kind[@]}" --libs kvshard-prometheus)"
  "$cxx" -std=c++20 "${cflags[@]}" "$here/consumer_prometheus/main.cpp" "${libs[@]}" -o "$work/exporter_by_pkg_config"
  "$work/exporter_by_pkg_config"
fi

if grep -rlE '#\s*include\s*[<"](spdlog|fmt|nlohmann|prometheus|ucp|ucs|cuda)' "$prefix/include"; then
  echo "installed headers bring headers of other projects"
  exit 1
fi
exporter=$(find "$prefix" -name 'libkvshard-prometheus.so.*' -type f)
if [[ -n $exporter ]] && nm -D -C --defined-only "$exporter" | cut -d' ' -f3- |
  grep -vE '^((typeinfo|typeinfo name|vtable) for )?kvshard::(PrometheusExporter|ExportedRank|Clock\b)'; then
  echo "$exporter exports what is not its API"
  exit 1
fi
if [[ -n $library ]]; then "$here/check_exports.sh" "$library" "$(find "$prefix" -name kvshard.h)"; fi
