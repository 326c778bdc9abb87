#!/usr/bin/env python3
"""The layer check passes a clean tree, and sees each kind of violation when one is planted in it.

Usage: check_layers_test.py CHECK_LAYERS_PY
"""

import pathlib
import subprocess
import sys
import tempfile

CLEAN = {
    "include/kvshard/api.hpp": '#include <vector>\n#include "kvshard/other.hpp"\n',
    "src/base/log.hpp": "#include <spdlog/spdlog.h>\n#include <fmt/format.h>\n",
    "src/layout/layout.hpp": '#include "base/log.hpp"\n',
    "src/wire/codec.hpp": '#include "layout/layout.hpp"\n',
    "src/session/rank.cpp": '#include "wire/codec.hpp"\n#include "kvshard/api.hpp"\n#include "local.hpp"\n',
    "src/session/local.hpp": "",
    "src/transport/transport_factory.cpp": '#include "transport/ucx/ucx.hpp"\n',
    "src/transport/ucx/ucx.hpp": "#include <ucp/api/ucp.h>\n",
    "src/copy/cuda/cuda.hpp": '#include <cuda_runtime_api.h>\n#include "kernels/gather.cuh"\n',
    "kernels/gather.cuh": "#include <cuda_runtime.h>\n",
    "tools/demo.cpp": '#include <CLI/CLI.hpp>\n#include "kvshard/api.hpp"\n',
}
VIOLATIONS = {
    "session knows a transport": ("src/session/rank.cpp", '#include "transport/ucx/ucx.hpp"'),
    "session knows one by a relative path": ("src/session/rank.cpp", '#include "../transport/ucx/ucx.hpp"'),
    "session knows CUDA": ("src/session/rank.cpp", "#include <cuda_runtime.h>"),
    "layout looks up": ("src/layout/layout.hpp", '#include "wire/codec.hpp"'),
    "wire looks up": ("src/wire/codec.hpp", '#include "session/local.hpp"'),
    "kernels know us": ("kernels/gather.cuh", '#include "kvshard/api.hpp"'),
    "public header brings spdlog": ("include/kvshard/api.hpp", "#include <spdlog/spdlog.h>"),
    "public header brings fmt": ("include/kvshard/api.hpp", "#  include <fmt/format.h>"),
    "public header brings UCX": ("include/kvshard/api.hpp", "#include <ucp/api/ucp.h>"),
    "public header brings CUDA": ("include/kvshard/api.hpp", "#include <cuda_runtime.h>"),
    "public header brings POSIX": ("include/kvshard/api.hpp", "#include <unistd.h>"),
    "public header brings our insides": ("include/kvshard/api.hpp", '#include "base/log.hpp"'),
    "UCX outside its transport": ("src/wire/codec.hpp", "#include <ucp/api/ucp.h>"),
    "prometheus-cpp in the library": ("src/session/rank.cpp", "#include <prometheus/registry.h>"),
    "a tool knows our insides": ("tools/demo.cpp", '#include "wire/codec.hpp"'),
    "a header that does not exist": ("src/wire/codec.hpp", '#include "wire/nothing.hpp"'),
    "a directory without a layer": ("src/novel/x.cpp", ""),
}


def check(script, files):
    with tempfile.TemporaryDirectory() as root:
        for name, text in files.items():
            path = pathlib.Path(root, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        done = subprocess.run([sys.executable, script, root], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr


def main():
    script = sys.argv[1]
    failed = 0
    code, output = check(script, CLEAN)
    if code != 0:
        print(f"a clean tree is refused:\n{output}")
        failed += 1
    for what, (path, line) in VIOLATIONS.items():
        code, output = check(script, {**CLEAN, path: CLEAN.get(path, "") + line + "\n"})
        if code != 1 or f"{path}:" not in output:
            print(f"not seen: {what}\n{output}")
            failed += 1
    print(f"{1 + len(VIOLATIONS)} cases, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
