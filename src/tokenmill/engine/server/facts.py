"""What a running server says of itself: its kind, model, context, slots and version.

Asks /v1/models, which every server of OpenAI's protocol has, then the pages that llama.cpp's and vLLM's have.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tokenmill.engine.engine import EngineKind, Identity, Speech
from tokenmill.engine.server.errors import fault_of
from tokenmill.engine.server.request import LLAMA
from tokenmill.engine.server.response import object_of
from tokenmill.errors import EngineError, UsageError

_ANSWER_S = 10.0
_RENAMED = (0, 11)  # vLLM: structured_outputs since; guided_* are gone since 0.12


@dataclass(frozen=True, slots=True)
class KnownServer:
    """What whoever started a server knows of it beforehand; None: the server is asked."""

    kind: EngineKind | None = None
    model_id: str | None = None
    build: str | None = None
    lanes: int | None = None
    context: int | None = None
    priorities: bool = False
    tools: bool = True
    pid: int | None = None


async def learn(client: httpx.AsyncClient, known: KnownServer, *, model: str | None = None) -> tuple[Identity, Speech]:
    """Who answers and how to speak to it; EngineError where nothing useful answers."""
    listed = await _get(client, "/v1/models")
    if listed is None:
        raise EngineError(f"{client.base_url} has no /v1/models", hint="is it a server of OpenAI's protocol?")
    entry = chosen(listed, model)
    props = await _get(client, "/props") if known.kind in (None, *LLAMA) else None
    said = await _get(client, "/version") if known.kind in (None, "vllm") else None
    kind = known.kind or kind_of(entry, props, said)
    version = str((said or {}).get("version", ""))
    speech = Speech(
        kind,
        str(entry["id"]),
        known.lanes or lanes_of(props),
        known.priorities and kind == "vllm",
        kind == "vllm" and older_than(version, _RENAMED),
        known.tools and tools_of(props),
    )
    identity = Identity(
        kind=kind,
        model=speech.model,
        model_id=known.model_id or foreign_id(kind, entry),
        build=known.build or build_of(kind, props, version),
        context=known.context or context_of(entry, props),
        lanes=speech.lanes,
        address=str(client.base_url).rstrip("/"),
        pid=known.pid,
    )
    return identity, speech


def chosen(listed: Mapping[str, Any], model: str | None) -> Mapping[str, Any]:
    """The entry of /v1/models to use: the one named, else the only one."""
    entries = [entry for entry in listed.get("data") or () if isinstance(entry, dict) and entry.get("id")]
    names = [str(entry["id"]) for entry in entries]
    if not entries:
        raise EngineError("the server lists no model", hint="has it loaded one?")
    if model is None and len(entries) > 1:
        raise UsageError(f"the server has {len(entries)} models", hint=f"name one: {', '.join(names[:10])}")
    if model is None:
        return entries[0]
    found = next((entry for entry in entries if entry["id"] == model or model in (entry.get("aliases") or ())), None)
    if found is None:
        raise UsageError(f"the server has no model {model}", hint=f"it has {', '.join(names[:10])}")
    return found


def kind_of(entry: Mapping[str, Any], props: Mapping[str, Any] | None, said: Mapping[str, Any] | None) -> EngineKind:
    """The kind of a server that we did not start."""
    if entry.get("owned_by") == "vllm":
        return "vllm"
    if props is not None and "total_slots" in props:
        return "llama-server" if "build_info" in props else "ik_llama"
    return "url" if said is None or "max_model_len" not in entry else "vllm"


def lanes_of(props: Mapping[str, Any] | None) -> int | None:
    """Slots of llama.cpp's server."""
    slots = (props or {}).get("total_slots")
    return slots if isinstance(slots, int) and slots > 0 else None


def tools_of(props: Mapping[str, Any] | None) -> bool:
    """Whether tools reach the model: llama.cpp's server drops them in silence where the chat template has no place."""
    return ((props or {}).get("chat_template_caps") or {}).get("supports_tools") is not False


def context_of(entry: Mapping[str, Any], props: Mapping[str, Any] | None) -> int | None:
    """Tokens of one sequence at most."""
    settings = (props or {}).get("default_generation_settings") or {}
    for size in (settings.get("n_ctx"), (props or {}).get("n_ctx"), entry.get("max_model_len")):
        if isinstance(size, int) and size > 0:
            return size
    return None


def build_of(kind: EngineKind, props: Mapping[str, Any] | None, version: str) -> str:
    """Engine and version in its own words."""
    if kind == "vllm":
        return f"vLLM {version}".strip()
    name = {"llama-server": "llama.cpp", "ik_llama": "ik_llama.cpp"}.get(kind)
    if name is None:
        return "unknown"
    return f"{name} {(props or {}).get('build_info', '')}".strip()


def foreign_id(kind: EngineKind, entry: Mapping[str, Any]) -> str:
    """An identity for a model whose file we have not seen: its name and the sizes that the server tells."""
    meta = entry.get("meta") or {}
    sizes = [str(meta[name]) for name in ("n_params", "size", "n_vocab") if meta.get(name)]
    return ":".join([kind, str(entry["id"]), *sizes])


def older_than(version: str, limit: tuple[int, int]) -> bool:
    """Whether a version that can be read is below a limit."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) < limit


async def _get(client: httpx.AsyncClient, path: str) -> dict[str, Any] | None:
    """A page of the server; None: it has no such page, or not as an object."""
    try:
        response = await client.get(path, timeout=_ANSWER_S)
    except httpx.TransportError as error:
        raise EngineError(
            f"nothing answers at {client.base_url}: {error or type(error).__name__}", hint="does the server run?"
        ) from error
    if response.status_code in (401, 403):
        raise fault_of(response.status_code, response.text)
    if response.status_code != httpx.codes.OK or not response.text.lstrip().startswith("{"):
        return None
    return object_of(response.text)
