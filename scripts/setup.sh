#!/usr/bin/env bash
# Installs what building, testing and linting kvshard need on Debian 12, if anything is missing.
set -euo pipefail

packages=(
  g++ cmake ninja-build ccache git pkg-config dpkg-dev file # build; packages
  libucx-dev libspdlog-dev libfmt-dev libssl-dev       # the library
  nlohmann-json3-dev libcli11-dev                      # registry, tools
  prometheus-cpp-dev                                   # the exporter
  libgtest-dev libgmock-dev libbenchmark-dev           # tests and benches
  etcd-server                                          # a registry in tests
  clang-format clang-tidy python3 python3-yaml iproute2  # checks; a network to cut in tests
  qemu-system-x86 busybox-static kmod ibverbs-providers  # a guest with RDMA devices: scripts/rdma_vm.sh
)

if ! command -v dpkg-query > /dev/null; then
  echo "== packages: this is no Debian; you need the equivalent of: ${packages[*]}"
  exit 0
fi
missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2> /dev/null || true)
  [[ $status == installed ]] || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  echo "== packages: all ${#packages[@]} are there"
  exit 0
fi
echo "== packages: installing ${missing[*]}"
as_root=()
[[ $(id -u) == 0 ]] || as_root=(sudo)
# Debian starts a service as it installs it, and enables it; etcd is here for tests to start.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
  trap '"${as_root[@]}" rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" > /dev/null
  "${as_root[@]}" chmod 755 "$policy"
fi
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install -qq -y --no-install-recommends "${missing[@]}" > /dev/null
if [[ -d /run/systemd/system && " ${missing[*]} " == *" etcd-server "* ]]; then
  "${as_root[@]}" systemctl disable -q etcd
fi
