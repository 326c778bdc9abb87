#!/usr/bin/env bash
# A shared kvshard exports its own API and nothing else: what it was built from must not meet an engine's
# own copies.
#   check_exports.sh LIBRARY
set -euo pipefail
exported=$(nm -D -C --defined-only "$1" | cut -d' ' -f3-)
if ! grep -q '^kvshard::PageLayout::create' <<< "$exported"; then
  echo "$1 does not export the API"
  exit 1
fi
foreign=$(grep -vE '^((typeinfo|typeinfo name|vtable) for )?kvshard::' <<< "$exported" || true)
private=$(grep -E '^kvshard::(log|http|wire|ucx|detail)::' <<< "$exported" || true)
mentions=$(grep -E 'spdlog|fmt::|httplib|nlohmann' <<< "$exported" || true)
if [[ -n $foreign$private$mentions ]]; then
  echo "$1 exports what is not its API:"
  printf '%s\n' "$foreign" "$private" "$mentions" | sed '/^$/d' | sort -u
  exit 1
fi
echo "exports: $(wc -l <<< "$exported") symbols, all of the API"
