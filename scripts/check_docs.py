#!/usr/bin/env python3
"""Checks the documentation: relative links lead somewhere, and the C++ blocks of docs/integration.md stand
in the example that is compiled and run."""
import pathlib
import re
import sys

root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
problems = []

for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
    text = page.read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", prose):
        if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists():
            problems.append(f"{page.relative_to(root)}: link to {target}, which is not there")


def squeeze(code):
    return re.sub(r"\s+", "", code)  # however the formatter breaks lines


example = squeeze((root / "examples/integration/integration.cpp").read_text())
blocks = re.findall(r"```cpp\n(.*?)```", (root / "docs/integration.md").read_text(), flags=re.S)
if not blocks:
    problems.append("docs/integration.md: no C++ blocks")
for block in blocks:
    if squeeze(block) not in example:
        problems.append(f"docs/integration.md: this block is not in the example:\n{block}")

print("\n".join(problems) if problems else f"documentation: {len(blocks)} code blocks and all links are good")
sys.exit(1 if problems else 0)
