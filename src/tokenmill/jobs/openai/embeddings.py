"""The body of /v1/embeddings, and a job's embeddings."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta, Struct

from tokenmill.jobs.openai.validation import validate
from tokenmill.storage.json_text import compact_json


class EmbeddingRequest(Struct, forbid_unknown_fields=True):
    """The body of /v1/embeddings; the engine checks the options."""

    input: (
        str
        | int
        | Annotated[list[str | int | list[Any]], Meta(min_length=1, description="Texts, tokens, or lists of tokens.")]
    )
    model: str | None = None
    encoding_format: Annotated[Any, Meta(extra_json_schema={"enum": ["float", "base64", None]})] = None
    dimensions: Annotated[Any, Meta(extra_json_schema={"type": ["integer", "null"]})] = None
    user: Annotated[Any, Meta(extra_json_schema={"type": ["string", "null"]})] = None


class EmbeddingList(TypedDict):
    """The engine's response, unchanged."""

    object: NotRequired[Literal["list"]]
    data: list[Any]
    usage: NotRequired[dict[str, Any]]


def checked_embeddings(body: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a job; raises RequestRefused, which names the key."""
    validate(EmbeddingRequest, body)
    return embedding_values(body)


def embedding_values(body: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a validated body: the input as a prompt, and the whole body under `embedding`."""
    given = body["input"]
    values = {key: body[key] for key in ("model", "encoding_format", "dimensions") if body.get(key) is not None}
    prompt = given if isinstance(given, str) else compact_json({"input": given})
    return {**values, "prompt": prompt, "max_tokens": 0, "embedding": dict(body)}
