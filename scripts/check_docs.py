#!/usr/bin/env python3
"""Checks the documentation: relative links lead somewhere, and C++ blocks stand in files that are compiled.

A block that cannot stand in one has a line `<!-- not compiled: why -->` right before it."""
import pathlib
import re
import sys

root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
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

print("\n".join(problems) if problems else f"documentation: {blocks} code blocks and all links are good")
sys.exit(1 if problems else 0)
