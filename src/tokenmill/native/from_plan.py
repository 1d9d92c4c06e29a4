"""A plan's settings in the words of the native engine: how to load its model, and what context to make."""

from tokenmill.errors import UsageError
from tokenmill.launch.dialect import offload_floor, visible_gpus
from tokenmill.native.context_settings import ContextSettings
from tokenmill.native.model import ModelSettings
from tokenmill.native.verify import request
from tokenmill.planner.plan import Plan


def settings_of(plan: Plan, *, sequences: int | None = None) -> tuple[ModelSettings, ContextSettings]:
    """Placement and knobs of a plan; `sequences` ids where more are wanted than the plan computes at once."""
    if plan.settings.engine != "llama.cpp":
        raise UsageError(
            f"a plan for {plan.settings.engine} cannot run in the native engine", hint="plan for --engine llama.cpp"
        )
    settings = plan.settings
    placed = request(plan)
    model = ModelSettings(
        gpus=placed.gpus,
        gpu_layers=placed.gpu_layers,
        tensor_split=placed.tensor_split,
        overrides=placed.overrides,
        mmap=settings.mmap,
        mlock=settings.mlock,
        repack=placed.repack,
    )
    context = ContextSettings(
        cells=settings.cells,
        context=settings.context,
        sequences=settings.sequences if sequences is None else sequences,
        ubatch=settings.ubatch,
        batch=max(settings.batch, settings.ubatch),
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
        flash_attention=settings.flash_attention,
        threads=settings.threads,
        threads_batch=settings.threads_batch,
        moe_cache_bytes=settings.moe_cache_bytes,
    )
    return model, context


def environment_of(plan: Plan) -> dict[str, str]:
    """Variables that the worker's process must start with: they are read before any of our code runs there."""
    found = visible_gpus(plan)
    gpus = request(plan).gpus
    if "CUDA_VISIBLE_DEVICES" in found:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))  # in the order the placement counts them
    floor = offload_floor(plan)
    if floor is not None:
        found["GGML_OP_OFFLOAD_MIN_BATCH"] = str(floor)
    return found
