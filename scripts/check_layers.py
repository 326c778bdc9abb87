#!/usr/bin/env python3
"""Checks that includes point one way, and that public headers bring only the standard library.

  session -> control, wire, layout, base        session sees transports and copy engines only through
  registry, control -> wire -> layout -> base   include/kvshard; one factory file each knows them all
  transport/*, copy/* -> base and their own SDK
  c_api -> the public API and base;  prometheus -> them and registry, for its HTTP server
  kernels -> the CUDA toolkit;  examples -> the public API;  tools -> it, examples and base

Usage: check_layers.py [ROOT]. Prints each violation as file:line and exits with 1.
"""

import pathlib
import re
import sys

# directory: the directories of ours that its files may include, besides itself and include/kvshard.
# The longest matching entry decides.
LAYERS = {
    "src/base": [],
    "src/layout": ["base"],
    "src/wire": ["layout", "base"],
    "src/control": ["wire", "base"],
    "src/registry": ["wire", "base"],
    "src/copy": ["base"],
    "src/copy/host": ["copy", "base"],
    "src/copy/cuda": ["copy", "kernels", "base"],
    "src/transport": ["base"],
    "src/transport/loopback": ["transport", "base"],
    "src/transport/ucx": ["transport", "base"],
    "src/session": ["control", "wire", "layout", "base"],
    "src/c_api": ["base"],
    "src/prometheus": ["registry", "base"],
    "include/kvshard": [],
    "kernels": [],
    "tools": ["examples", "base"],
    "examples": [],
}
INCLUDE_ROOTS = ["src", ".", "examples", "tools"]
# Files that choose an implementation, and so know all of them.
FACTORIES = {
    "src/copy/copy_factory.cpp": ["copy/host", "copy/cuda"],
    "src/transport/transport_factory.cpp": ["transport/loopback", "transport/ucx"],
}
# Headers of other projects: which directories may include them. What is not named here may be included
# anywhere outside include/kvshard.
SDKS = {
    r"uc[pst]/": ["src/transport/ucx", "tools/bench", "tools/doctor"],
    r"(cuda|cooperative_groups|cub/|nvtx)": ["src/copy/cuda", "src/transport/ucx", "kernels", "tools", "examples"],
    r"spdlog/": ["src/base"],
    r"openssl/": ["src/control"],
    r"fmt/": ["src", "tools", "examples"],
    r"nlohmann/": ["src/registry", "tools", "examples"],
    r"prometheus/": ["src/prometheus"],
    r"CLI/": ["tools", "examples"],
}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
SUFFIXES = {".hpp", ".cpp", ".cu", ".cuh", ".h"}


def layer_of(path):
    """The entry of LAYERS that holds a path such as src/copy/host/x.cpp, or None."""
    parts = path.split("/")[:-1]
    for length in range(len(parts), 0, -1):
        if "/".join(parts[:length]) in LAYERS:
            return "/".join(parts[:length])
    return None


def problem(root, path, quoted, target):
    """Why `path` must not include `target`, or None."""
    layer = layer_of(path)
    if not quoted:
        if layer == "include/kvshard" and not re.fullmatch(r"[a-z_0-9]+|std(bool|def|int)\.h", target):
            return f"a public header includes <{target}>, which is no header of the standard library"
        for pattern, allowed in SDKS.items():
            if re.match(pattern, target) and not any((path + "/").startswith(a + "/") for a in allowed):
                return f"<{target}> belongs to {', '.join(allowed)}"
        return None
    if target.startswith("kvshard/"):
        if layer == "kernels":
            return f'kernels include nothing of ours, but this includes "{target}"'
        return None
    if layer == "include/kvshard":
        return f'a public header includes "{target}"'
    candidates = [(root / path).parent / target, *(root / top / target for top in INCLUDE_ROOTS)]
    file = next((c.resolve() for c in candidates if c.is_file()), None)
    if file is None or not file.is_relative_to(root):
        return f'"{target}" is neither beside this file nor under {", ".join(INCLUDE_ROOTS)}'
    owner = file.relative_to(root).as_posix()
    used = layer_of(owner) or owner
    short = used.removeprefix("src/")
    if used == layer or short in LAYERS[layer] + FACTORIES.get(path, []):
        return None
    return f'{layer} must not include {short} ("{target}")'


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    tops = sorted({layer.split("/")[0] for layer in LAYERS})
    files = sorted(f for top in tops for f in (root / top).rglob("*") if f.suffix in SUFFIXES)
    violations = 0
    for file in files:
        path = file.relative_to(root).as_posix()
        if layer_of(path) is None:
            print(f"{path}:1: no layer is named for this directory in scripts/check_layers.py")
            violations += 1
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            match = INCLUDE.match(line)
            if match and (why := problem(root, path, match[1] == '"', match[2])):
                print(f"{path}:{number}: {why}")
                violations += 1
    if not files:
        print(f"no source under {root}")
        return 1
    print(f"layer check: {len(files)} files, {violations} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
