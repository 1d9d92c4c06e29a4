"""Images and audio in the messages of a chat, in OpenAI's format: parts of type image_url and input_audio."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

Kind = Literal["image", "audio"]
NO_IMAGES, NO_AUDIO = "images_not_supported", "audio_not_supported"  # codes of errors
_KINDS: Mapping[str, Kind] = {"image_url": "image", "input_audio": "audio"}


def media_kinds(messages: Iterable[Mapping[str, Any]]) -> frozenset[Kind]:
    """The kinds of media in the messages."""
    return frozenset(_KINDS[part["type"]] for part in _media(messages))


def has_remote_media(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether an image is given by a URL that an engine would have to fetch."""
    return any(
        not part["image_url"]["url"].startswith("data:") for part in _media(messages) if part["type"] == "image_url"
    )


def _media(messages: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if part["type"] in _KINDS)
