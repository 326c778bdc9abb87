#!/usr/bin/env python3
"""Checks that an alert file is YAML, and that each rule has what Prometheus and people need.

Usage: check_alerts.py ALERTS_YML. What the expressions mean is not looked at here."""
import sys

try:
    import yaml
except ImportError:
    print("skipped: no python3-yaml")
    sys.exit(77)

with open(sys.argv[1], encoding="utf-8") as file:
    rules = [rule for group in yaml.safe_load(file)["groups"] for rule in group["rules"]]
names = [rule["alert"] for rule in rules]
problems = [f"{name}: named twice" for name in set(names) if names.count(name) > 1]
for rule in rules:
    unknown = set(rule) - {"alert", "expr", "for", "labels", "annotations"}
    if unknown:
        problems.append(f"{rule['alert']}: {unknown} is no part of a rule")
    if rule.get("labels", {}).get("severity") not in ("warning", "critical"):
        problems.append(f"{rule['alert']}: no severity")
    if not {"summary", "description"} <= set(rule.get("annotations", {})):
        problems.append(f"{rule['alert']}: tells people nothing")
    if not rule.get("expr", "").strip():
        problems.append(f"{rule['alert']}: no expression")
print("\n".join(problems) if problems else f"alerts: {len(rules)} rules")
sys.exit(1 if problems or not rules else 0)
