"""Dagster on a tokenmill gateway: a partition is a batch, a run that comes again waits for it."""

from dagster_tokenmill.assets import COLUMNS, POOL, Made, batch_asset, mill_asset
from dagster_tokenmill.batch import Batch
from dagster_tokenmill.checks import checks_for
from dagster_tokenmill.errors import BatchExpired, BatchRefused, BatchStopped, GatewayAway, GatewayError, Refused
from dagster_tokenmill.mill import GatewayMill, GatewayRan, Terms, Worked
from dagster_tokenmill.recipes import distill_asset, expand_asset, summarize_asset
from dagster_tokenmill.resource import BatchResult, TokenmillResource
from dagster_tokenmill.sensor import finished_batches_sensor, run_for

__version__ = "0.1.0"
__all__ = [
    "COLUMNS",
    "POOL",
    "Batch",
    "BatchExpired",
    "BatchRefused",
    "BatchResult",
    "BatchStopped",
    "GatewayAway",
    "GatewayError",
    "GatewayMill",
    "GatewayRan",
    "Made",
    "Refused",
    "Terms",
    "TokenmillResource",
    "Worked",
    "batch_asset",
    "checks_for",
    "distill_asset",
    "expand_asset",
    "finished_batches_sensor",
    "mill_asset",
    "run_for",
    "summarize_asset",
]
