"""Prints how a recorded run (``--flexpipe-record``) switched plans, and why, for the last few."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def main(path: str, shown: int = 4) -> None:
    """Read the plans of all iterations and print the switches among them."""
    lines = [line.partition("#") for line in Path(path).read_text().splitlines()]
    plans = [plan.partition(";")[0].strip() for plan, _, _ in lines]
    changes = [i for i in range(1, len(plans)) if plans[i] != plans[i - 1]]
    print(f" {len(changes)} switches in {len(plans)} iterations; the last ones:")
    for i in changes[-shown:]:
        note = lines[i][2]
        action = re.search(r"action ([^;]+)", note)
        did = action[1].strip() if action else ""
        print(f" iteration {i + 1} {did}:  {plans[i - 1]}  ->  {plans[i]}")
        for reason in re.findall(r"\b([A-D]: [^;]*)", note):
            print(f"    {reason}")
            if reason[0] in "BD" and reason.endswith("yes)"):
                print("    in this iteration; it does over the coming ones (look-ahead)")


if __name__ == "__main__":
    main(sys.argv[1])
