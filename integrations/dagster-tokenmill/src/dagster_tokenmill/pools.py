"""`dagster-tokenmill pools`: Dagster's pool, sized by the lanes of a gateway."""

import argparse
import os
import sys
from collections.abc import Sequence

import dagster as dg

from dagster_tokenmill.assets import POOL
from dagster_tokenmill.resource import TokenmillResource


def main(given: Sequence[str] | None = None) -> int:
    """Set the pool's limit in the instance of DAGSTER_HOME, and say it."""
    parser = argparse.ArgumentParser(prog="dagster-tokenmill", description="Dagster beside a tokenmill gateway.")
    pools = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "pools", help="set a pool's limit from the gateway's lanes"
    )
    address = os.environ.get("TOKENMILL_URL", "http://127.0.0.1:8181")
    pools.add_argument("--url", default=address, help="the gateway's address, or $TOKENMILL_URL; now: %(default)s")
    pools.add_argument("--model", help="count the lanes of its engines alone")
    pools.add_argument("--pool", default=POOL, help="the pool; default: %(default)s")
    each = "lanes that one batch is meant to fill; default: %(default)s"
    pools.add_argument("--lanes-each", type=int, default=1, metavar="N", help=each)
    asked = parser.parse_args(given)
    if asked.lanes_each < 1:
        parser.error("--lanes-each must be at least 1")
    resource = TokenmillResource(
        base_url=asked.url, api_key=os.environ.get("TOKENMILL_API_KEY"), model=asked.model, first_patience_s=5.0
    )
    try:
        with dg.DagsterInstance.get() as instance:
            limit = resource.size_pool(instance, asked.pool, lanes_each=asked.lanes_each)
    except dg.Failure as error:
        sys.stderr.write(f"error: {error.description}\n")
        return 1
    sys.stdout.write(f"{asked.pool} {limit}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
