#!/usr/bin/env python3
"""Checks the documentation: relative links lead somewhere, C++ blocks stand in files that are compiled, and shell
blocks call scripts that are there and, with --tools DIR, our programs with options that those have.

  check_docs.py [ROOT] [--tools DIR]

A C++ block that cannot stand in a file has a line `<!-- not compiled: why -->` right before it."""
import argparse
import functools
import pathlib
import re
import shlex
import subprocess
import sys

parser = argparse.ArgumentParser()
parser.add_argument("root", nargs="?", type=pathlib.Path, default=pathlib.Path(__file__).parent.parent)
parser.add_argument("--tools", type=pathlib.Path)
arguments = parser.parse_args()
root = arguments.root.resolve()
problems = []

pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
for page in pages:
    text = page.read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", prose):
        if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists():
            problems.append(f"{page.relative_to(root)}: link to {target}, which is not there")


def squeeze(code):
    return re.sub(r"\s+", "", code)  # however the formatter breaks lines


compiled = [
    squeeze(file.read_text())
    for top in ("examples", "tests", "include")
    for file in (root / top).rglob("*")
    if file.suffix in {".hpp", ".cpp"}
]
blocks = 0
for page in pages:
    for excuse, block in re.findall(r"(<!-- not compiled: [^\n]* -->\n)?```cpp\n(.*?)```", page.read_text(), flags=re.S):
        blocks += 1
        if not excuse and not any(squeeze(block) in file for file in compiled):
            problems.append(f"{page.relative_to(root)}: this block is in no file that is compiled:\n{block}")
if blocks == 0:
    problems.append("no C++ blocks")



@functools.cache
def help_of(*command):
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout if done.returncode == 0 else ""


commands = 0
for page in pages:
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = [w for w in shlex.split(line, comments=True) if not re.match(r"\w+=", w) and w != "export"]
            if not words:
                continue
            name = pathlib.PurePath(words[0]).name
            where = f"{page.relative_to(root)}: {' '.join(words)[:60]}"
            if words[0].startswith("scripts/") and not (root / words[0]).exists():
                problems.append(f"{where}: there is no such script")
            if "/bench/" in words[0] and not list((root / "bench").glob(f"{name}.c*")):
                problems.append(f"{where}: there is no such bench")
            if not arguments.tools or not name.startswith("kvshard-"):
                continue
            commands += 1
            texts = [help_of(arguments.tools / name)]
            if len(words) > 1 and re.search(rf"^ +{re.escape(words[1])}( |$)", texts[0], flags=re.M):
                texts.append(help_of(arguments.tools / name, words[1]))
            known = set(re.findall(r"--[a-z-]+", " ".join(texts)))
            for option in re.findall(r"--[a-z-]+", " ".join(words[1:])):
                if option not in known:
                    problems.append(f"{where}: {name} has no {option}")
if arguments.tools and commands == 0:
    problems.append("no commands")

print("\n".join(problems) if problems else f"documentation: {blocks} code blocks, {commands} commands and all links are good")
sys.exit(1 if problems else 0)
