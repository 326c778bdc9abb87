#!/usr/bin/env bash
# Formats every source file in place; with --check, only says which ones differ.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Versions format differently: Debian 12's decides.
tool=$(command -v clang-format-14 || command -v clang-format || true)
if [[ -z $tool ]]; then
  echo "format: skipped, there is no clang-format"
  exit 77
fi
command='"$0" --style=file -i "$1"'
if [[ ${1:-} == --check ]]; then
  command='"$0" --style=file "$1" | cmp -s - "$1" || { echo "format: $1 differs: run scripts/format.sh"; exit 1; }'
fi
find include src kernels tests tools examples bench \
  \( -name '*.h' -o -name '*.c' -o -name '*.hpp' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
  xargs -0 -P "$(nproc)" -n 1 bash -c "$command" "$tool"
