"""Many dry runs of llama.cpp in one process, because starting a process takes longer; `dryrun.project` starts one
for each.

dry_runs.py < ORDERS      reads a list of orders; prints a list of the results
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenmill.decode import decode
from tokenmill.native.llama import cdefs, dry_run
from tokenmill.native.llama.library import open_library

LIMIT_S = 250.0


def projected(orders: Sequence[tuple[Path, dry_run.DryRun]]) -> list[tuple[dry_run.ContextProjection, ...]]:
    """What llama.cpp takes for each of these files, under each context asked for."""
    asked = json.dumps([asdict(dry_run._Order(str(path), run)) for path, run in orders])
    done = subprocess.run(
        [sys.executable, __file__], input=asked, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return [tuple(decode(dry_run.ContextProjection, one, where="a dry run") for one in contexts) for contexts in found]


def main() -> None:
    answer_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    library = open_library(more=cdefs.BREAKDOWN if cdefs.breakdown_readable() else "")
    dry_run._limit_addresses()
    llama = dry_run._Llama(library)
    orders = [decode(dry_run._Order, order, where="an order") for order in json.load(sys.stdin)]
    json.dump([[asdict(one) for one in llama.project(order.model, order.run)] for order in orders], answer_to)
    answer_to.close()


if __name__ == "__main__":
    main()
