"""`dagster-tokenmill pools`: sets the limit of a Dagster pool to the number of slots of a gateway."""

import argparse
import os
import sys
from collections.abc import Sequence

import dagster as dg

from dagster_tokenmill.assets import POOL
from dagster_tokenmill.resource import TokenmillResource


def main(given: Sequence[str] | None = None) -> int:
    """Set the pool's limit in the instance of DAGSTER_HOME and print it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="dagster-tokenmill", description="Configure Dagster for a tokenmill gateway.")
    pools = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "pools", help="set the limit of a pool to the gateway's number of slots"
    )
    address = os.environ.get("TOKENMILL_URL", "http://127.0.0.1:8181")
    pools.add_argument("--url", default=address, help="URL of the gateway, default: $TOKENMILL_URL (%(default)s)")
    pools.add_argument("--model", help="count only the slots of engines that serve this model")
    pools.add_argument("--pool", default=POOL, help="name of the pool, default: %(default)s")
    each = "number of slots that one batch should fill, default: %(default)s"
    pools.add_argument("--lanes-each", dest="slots_each", type=int, default=1, metavar="N", help=each)
    arguments = parser.parse_args(given)
    if arguments.slots_each < 1:
        parser.error(f"--lanes-each must be at least 1 (got {arguments.slots_each})")
    resource = TokenmillResource(
        base_url=arguments.url, api_key=os.environ.get("TOKENMILL_API_KEY"), model=arguments.model, first_patience_s=5.0
    )
    try:
        with dg.DagsterInstance.get() as instance:
            limit = resource.size_pool(instance, arguments.pool, slots_each=arguments.slots_each)
    except dg.Failure as error:
        sys.stderr.write(f"error: {error.description}\n")
        return 1
    sys.stdout.write(f"{arguments.pool} {limit}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
