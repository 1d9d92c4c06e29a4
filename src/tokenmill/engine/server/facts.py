"""Discovers the kind, model, context, slots and version of a running server. Entry point: `discover`.

Uses /v1/models, which all OpenAI-compatible servers have, then endpoints of llama.cpp and vLLM.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tokenmill.engine.engine import EngineKind, HttpApi, Identity
from tokenmill.engine.server.errors import to_error
from tokenmill.engine.server.request import LLAMA
from tokenmill.engine.server.response import object_of
from tokenmill.errors import EngineError, UsageError

_TIMEOUT_S = 10.0
_STRUCTURED_OUTPUTS = (0, 11)  # vLLM version that replaced guided_*, which 0.12 removed


@dataclass(frozen=True, slots=True)
class KnownServer:
    """Facts known to the process that started the server; None: discovered from the server."""

    kind: EngineKind | None = None
    model_id: str | None = None
    build: str | None = None
    slots: int | None = None
    context: int | None = None
    priorities: bool = False
    tools: bool = True
    remote_media: bool = False
    pid: int | None = None


async def discover(
    client: httpx.AsyncClient, known: KnownServer, *, model: str | None = None
) -> tuple[Identity, HttpApi]:
    """Return the identity and the API of a server; EngineError if no usable server answers."""
    listed = await _get(client, "/v1/models")
    if listed is None:
        raise EngineError(f"{client.base_url} has no /v1/models", hint="is it an OpenAI-compatible server?")
    entry = chosen(listed, model)
    props = await _get(client, "/props") if known.kind in (None, *LLAMA) else None
    version_info = await _get(client, "/version") if known.kind in (None, "vllm") else None
    kind = known.kind or kind_of(entry, props, version_info)
    version = str((version_info or {}).get("version", ""))
    api = HttpApi(
        kind,
        str(entry["id"]),
        known.slots or slots_of(props),
        known.priorities and kind == "vllm",
        kind == "vllm" and older_than(version, _STRUCTURED_OUTPUTS),
        known.tools and tools_of(props),
        accepts(props, "vision"),
        accepts(props, "audio"),
        known.remote_media,
    )
    identity = Identity(
        kind=kind,
        model=api.model,
        model_id=known.model_id or foreign_id(kind, entry),
        build=known.build or build_of(kind, props, version),
        context=known.context or context_of(entry, props),
        slots=api.slots,
        address=str(client.base_url).rstrip("/"),
        pid=known.pid,
    )
    return identity, api


def chosen(listed: Mapping[str, Any], model: str | None) -> Mapping[str, Any]:
    """Select an entry of /v1/models: the named one, else the only one. UsageError if neither exists."""
    entries = [entry for entry in listed.get("data") or () if isinstance(entry, dict) and entry.get("id")]
    names = [str(entry["id"]) for entry in entries]
    if not entries:
        raise EngineError("the server lists no model", hint="has it loaded one?")
    if model is None and len(entries) > 1:
        raise UsageError(f"the server has {len(entries)} models", hint=f"select one of {', '.join(names[:10])}")
    if model is None:
        return entries[0]
    found = next((entry for entry in entries if entry["id"] == model or model in (entry.get("aliases") or ())), None)
    if found is None:
        raise UsageError(f"the server has no model {model}", hint=f"it has {', '.join(names[:10])}")
    return found


def kind_of(
    entry: Mapping[str, Any], props: Mapping[str, Any] | None, version_info: Mapping[str, Any] | None
) -> EngineKind:
    """Detect the kind of a server that tokenmill did not start."""
    if entry.get("owned_by") == "vllm":
        return "vllm"
    if props is not None and "total_slots" in props:
        return "llama-server" if "build_info" in props else "ik_llama"
    return "url" if version_info is None or "max_model_len" not in entry else "vllm"


def slots_of(props: Mapping[str, Any] | None) -> int | None:
    """Number of slots of a llama.cpp server; None if unknown."""
    slots = (props or {}).get("total_slots")
    return slots if isinstance(slots, int) and slots > 0 else None


def tools_of(props: Mapping[str, Any] | None) -> bool:
    """Whether the model sees tools: llama.cpp silently drops them if the chat template does not support them."""
    return ((props or {}).get("chat_template_caps") or {}).get("supports_tools") is not False


def accepts(props: Mapping[str, Any] | None, kind: str) -> bool:
    """Whether the server accepts images ("vision") or "audio"; true if only the server itself knows."""
    modalities = (props or {}).get("modalities")
    return not isinstance(modalities, dict) or modalities.get(kind) is True


def context_of(entry: Mapping[str, Any], props: Mapping[str, Any] | None) -> int | None:
    """Maximum tokens of one sequence; None if unknown."""
    settings = (props or {}).get("default_generation_settings") or {}
    for size in (settings.get("n_ctx"), (props or {}).get("n_ctx"), entry.get("max_model_len")):
        if isinstance(size, int) and size > 0:
            return size
    return None


def build_of(kind: EngineKind, props: Mapping[str, Any] | None, version: str) -> str:
    """Engine name and version."""
    if kind == "vllm":
        return f"vLLM {version}".strip()
    name = {"llama-server": "llama.cpp", "ik_llama": "ik_llama.cpp"}.get(kind)
    if name is None:
        return "unknown"
    return f"{name} {(props or {}).get('build_info', '')}".strip()


def foreign_id(kind: EngineKind, entry: Mapping[str, Any]) -> str:
    """Identity of a model whose file is not available: its name and the sizes that the server reports."""
    meta = entry.get("meta") or {}
    sizes = [str(meta[name]) for name in ("n_params", "size", "n_vocab") if meta.get(name)]
    return ":".join([kind, str(entry["id"]), *sizes])


def older_than(version: str, limit: tuple[int, int]) -> bool:
    """Whether a version is below a limit; False if it cannot be parsed."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) < limit


async def _get(client: httpx.AsyncClient, path: str) -> dict[str, Any] | None:
    """Fetch a JSON object; None if the endpoint does not exist or returns something else."""
    try:
        response = await client.get(path, timeout=_TIMEOUT_S)
    except httpx.TransportError as error:
        raise EngineError(
            f"nothing answers at {client.base_url}: {error or type(error).__name__}", hint="is the server running?"
        ) from error
    if response.status_code in (401, 403):
        raise to_error(response.status_code, response.text)
    if response.status_code != httpx.codes.OK or not response.text.lstrip().startswith("{"):
        return None
    return object_of(response.text)
