"""`python -m bench` (`make bench`): every comparison, each in a process of its own, and one summary at the end.

Flags are handed to every script, so `--repeats 1` makes a quick run of it all.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from bench.compare import read_findings
from bench.report import say

SCRIPTS = (
    "scheduler_core",
    "simulate",
    "redis_index",
    "exact_text",
    "prefix",
    "fairness",
    "step_overhead",
    "kv_waste",
    "kv_pressure",
    "kv_capacity",
    "disconnects",
    "redis_outage",
    "restart",
    "workers",
    "static_batching",
)


def main() -> int:
    """Run all scripts; return 1 when a claim was missed or a script failed."""
    summary: list[str] = []
    all_hold = True
    for name in SCRIPTS:
        say(f"== bench.{name}")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "findings.json"
            command = [sys.executable, "-m", f"bench.{name}", *sys.argv[1:], "--findings-path", str(path)]
            all_hold = subprocess.run(command, check=False).returncode == 0 and all_hold
            findings = read_findings(path)
        summary += [str(finding) for finding in findings] or [f"{name}: FAILED"]
    say("\n== summary: median (lowest to highest, repeats)")
    for line in summary:
        say(line)
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
