"""tokenmill: plan, load and batch language models that barely fit the machine.

    plan(model, ...)      which memory holds which tensors, and the predicted speed; loads nothing
    run(jobs, ...)        run a durable batch; the same call continues it after a crash
    submit(jobs, ...)     store a batch without running it
    work(...)             run the batches of a store
    open_store(...)       read batches and results
    load(model, ...)      load an engine: `with tokenmill.load("smollm2") as engine: engine.chat("Hello")`
    serve(model, ...)     serve models over HTTP in OpenAI's protocol, in the background
    tune(model, ...)      measure the best settings on this machine; plan, run, load and serve use them
    probe()               describe this machine
    inspect(model)        describe a model from its header

Names are imported on first use, because the processes of an engine import this package too. Messages go to the
standard logger `tokenmill`. Errors are the classes of `tokenmill.errors`. Names that are not in `__all__` are private,
except where docs/python.md names them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokenmill.version import __version__

if TYPE_CHECKING:
    from tokenmill.api.batches import run, submit
    from tokenmill.api.engines.loaded import Engine, load
    from tokenmill.api.inspecting import inspect, probe
    from tokenmill.api.planning.plan import plan
    from tokenmill.api.stores import BatchStore, open_store
    from tokenmill.api.summary import Summary, WorkSummary
    from tokenmill.api.tuning import tune
    from tokenmill.api.workers import work
    from tokenmill.engine.engine import Answer
    from tokenmill.gateway.service import Server, serve
    from tokenmill.hardware.machine import Machine
    from tokenmill.jobs.models import Batch
    from tokenmill.model.profile import Profile as ModelProfile
    from tokenmill.planner.plan import Plan
    from tokenmill.tuner.point import OperatingPoint

__all__ = [
    "Answer",
    "Batch",
    "BatchStore",
    "Engine",
    "Machine",
    "ModelProfile",
    "OperatingPoint",
    "Plan",
    "Server",
    "Summary",
    "WorkSummary",
    "__version__",
    "inspect",
    "load",
    "open_store",
    "plan",
    "probe",
    "run",
    "serve",
    "submit",
    "tune",
    "work",
]

_MODULES = {
    "Answer": "tokenmill.engine.engine",
    "Batch": "tokenmill.jobs.models",
    "BatchStore": "tokenmill.api.stores",
    "Engine": "tokenmill.api.engines.loaded",
    "Machine": "tokenmill.hardware.machine",
    "ModelProfile": "tokenmill.model.profile:Profile",
    "OperatingPoint": "tokenmill.tuner.point",
    "Plan": "tokenmill.planner.plan",
    "Server": "tokenmill.gateway.service",
    "Summary": "tokenmill.api.summary",
    "WorkSummary": "tokenmill.api.summary",
    "inspect": "tokenmill.api.inspecting",
    "load": "tokenmill.api.engines.loaded",
    "open_store": "tokenmill.api.stores",
    "plan": "tokenmill.api.planning.plan",
    "probe": "tokenmill.api.inspecting",
    "run": "tokenmill.api.batches",
    "serve": "tokenmill.gateway.service",
    "submit": "tokenmill.api.batches",
    "tune": "tokenmill.api.tuning",
    "work": "tokenmill.api.workers",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
    module, _, attribute = _MODULES[name].partition(":")  # after the colon: its name in that module
    value = getattr(import_module(module), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
