"""Dagster assets computed by a tokenmill gateway: a partition is a batch, and a restarted run re-attaches to it.

assets     batch_asset, recipe_asset
recipes    expand_asset, distill_asset, summarize_asset
resource   TokenmillResource
runner     runs the stages of a recipe as batches of the gateway
gateway    the gateway's HTTP API
batch      batches and their keys
source     where an asset reads its rows
paths      where an asset writes its file
facts      the metadata of a materialisation
checks     checks_for
sensor     finished_batches_sensor
pools      the command `dagster-tokenmill pools`
"""

from dagster_tokenmill.assets import COLUMNS, POOL, AssetOutput, batch_asset, recipe_asset
from dagster_tokenmill.batch import Batch
from dagster_tokenmill.checks import checks_for
from dagster_tokenmill.errors import (
    BatchCancelled,
    BatchExpired,
    BatchRefused,
    GatewayError,
    GatewayRefused,
    GatewayUnavailable,
)
from dagster_tokenmill.recipes import distill_asset, expand_asset, summarize_asset
from dagster_tokenmill.resource import BatchResult, TokenmillResource
from dagster_tokenmill.runner import BatchOptions, GatewayRunner, GatewayStage, RunBatch
from dagster_tokenmill.sensor import finished_batches_sensor, run_for

__version__ = "0.1.0"
__all__ = [
    "COLUMNS",
    "POOL",
    "AssetOutput",
    "Batch",
    "BatchCancelled",
    "BatchExpired",
    "BatchOptions",
    "BatchRefused",
    "BatchResult",
    "GatewayError",
    "GatewayRefused",
    "GatewayRunner",
    "GatewayStage",
    "GatewayUnavailable",
    "RunBatch",
    "TokenmillResource",
    "batch_asset",
    "checks_for",
    "distill_asset",
    "expand_asset",
    "finished_batches_sensor",
    "recipe_asset",
    "run_for",
    "summarize_asset",
]
