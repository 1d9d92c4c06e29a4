"""Identity of a job, and its place: a sort key that makes jobs with a common prefix adjacent.

The identity is a SHA-256 of the model's identity and a canonical request. Two requests are identical if every engine
must treat them alike. Missing a reuse costs time, but a wrong reuse is a wrong answer, so in doubt requests differ:

- Ignored are custom_id, user, metadata, timeout, priority, deadline, the model name in the body, and keys that only
  OpenAI's service uses. A missing seed makes no difference: existing answers are reused even if they were sampled.
- The order of keys in a body or message does not matter, nor whether a number is written 1 or 1.0, nor which of two
  synonyms is used (max_tokens, max_completion_tokens).
- The order of keys inside tools, schemas, template arguments and tool calls matters: it affects the prompt or grammar.
- null means absent. A value that equals an engine's default does not, because engines have different defaults; only
  values that are equivalent by definition do (n: 1, logprobs: false, an empty stop, tool_choice: "auto").
- Text is compared by its UTF-8 bytes, without normalization.

The place has a four-byte checksum for each chunk of the canonical prompt, so that sorting by place walks the prefix
tree depth first, and the common prefix of two places shows the common prefix of their prompts to a chunk. Chunks have
64 bytes up to 256, 128 up to 512 (table rows, one-line questions), 512 up to 12 KiB, 2 KiB up to 64 KiB (a digest of
16 K tokens), and 16 KiB up to 272 KiB; one more checksum covers the rest, so prompts that differ later are adjacent, in
no particular order. Checksums can collide: places are used for ordering, texts determine what is shared.

Stores may contain places in an older format, whose first chunk has 512 bytes. They end with four bytes of the identity
instead of three. An old place is read as if its first checksum were repeated for each of the small chunks: it shares
prefixes with other old places as before, and none with new ones.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import sha256
from itertools import accumulate
from struct import Struct
from typing import Any, NamedTuple
from zlib import crc32

from tokenmill.jobs.openai.call import Call, Endpoint
from tokenmill.storage.json_text import compact_json

CHUNK_BYTES = 512
FINE_BYTES = 64
_FINE_SIZES = [FINE_BYTES] * 4 + [2 * FINE_BYTES] * 2
FINE_CHUNKS = len(_FINE_SIZES)  # in the first CHUNK_BYTES
_SIZES = _FINE_SIZES + [CHUNK_BYTES] * 23 + [4 * CHUNK_BYTES] * 26 + [32 * CHUNK_BYTES] * 13
MAX_CHUNKS = len(_SIZES) + 1  # the last one covers the rest
ENDS = tuple(accumulate(_SIZES, initial=0))
"""Prompt bytes covered by the first N chunks, by N."""
_FORM = "tokenmill job 1"  # increment when the canonical form changes
_TOOLS_FORM = ("tools_form", 2)  # excludes answers from before tool calls were enforced and parsed
_NOT_SAMPLING = frozenset(
    (
        "messages",
        "prompt",
        "tools",
        "tool_choice",
        "template_arguments",
        "model",
        "timeout",
        "priority",
        "deadline",
        "stream",
        "stream_options",
        "response",
        "embedding",
    )
)
# By number of complete chunks; faster than slicing, which matters for millions of lines.
_CUT = [Struct("".join(f"{size}s" for size in _SIZES[:count])).unpack_from for count in range(MAX_CHUNKS)]
_PACKED = [Struct(f">{count + 1}I").pack for count in range(MAX_CHUNKS)]
KEY_BYTES = 4  # of a prefix key, per chunk
_TAIL_BYTES = 3  # of the identity in a place; not a multiple of four, which marks the older format
_OLD_TAIL_BYTES = 4
_PREAMBLE = ("tools", "tool_choice", "template_arguments")
_PREAMBLE_KEYS = frozenset(_PREAMBLE)


class Placed(NamedTuple):
    """A job's identity, its place, and the size of its canonical prompt."""

    identity: bytes
    place: bytes
    prompt_bytes: int


def place(model_id: str, call: Call) -> Placed:
    """Identity and place of a call for one model."""
    return Placed(*place_values(model_id, call.endpoint, call.values))


def place_values(model_id: str, endpoint: Endpoint, values: Mapping[str, Any]) -> tuple[bytes, bytes, int]:
    """Like `place`, without creating objects, for millions of lines."""
    prompt = values.get("prompt")
    if type(prompt) is tuple:
        lengths = "tokens"
        text = array("I", prompt).tobytes()
    else:
        parts = _parts(values) if prompt is None else [prompt]
        # The lengths make the joined parts unambiguous.
        lengths = ",".join([str(len(part)) for part in parts])
        text = "\n".join(parts).encode()
    sampling = [item for item in values.items() if item[0] not in _NOT_SAMPLING]
    if "tools" in values:
        sampling.append(_TOOLS_FORM)
    header = b"%b%b\n" % (_header(model_id, endpoint, tuple(sampling)), lengths.encode())
    identity = sha256(header + text).digest()
    return identity, prefix_key_of(text) + identity[:_TAIL_BYTES], len(text)


def prompt_text(call: Call) -> str:
    """The canonical prompt: tools and template arguments, then roles and contents, in the order of chat templates."""
    prompt = call.values.get("prompt")
    if isinstance(prompt, tuple):
        return " ".join(map(str, prompt))
    return "\n".join(_parts(call.values)) if prompt is None else str(prompt)


def prefix_key_of(prompt: str | bytes) -> bytes:
    """The prefix key of a prompt: four bytes per chunk."""
    text = prompt.encode() if isinstance(prompt, str) else prompt
    if len(text) <= FINE_BYTES:
        return crc32(text).to_bytes(KEY_BYTES, "big")
    whole = bisect_left(ENDS, len(text)) - 1  # chunks, before what is left
    return _PACKED[whole](*map(crc32, _CUT[whole](text)), crc32(text[ENDS[whole] :]))


def stored_prefix_key(place: bytes) -> bytes:
    """The prefix key in a place, without the identity bytes, which distinguish equal prompts."""
    if len(place) % KEY_BYTES == _TAIL_BYTES:
        return place[:-_TAIL_BYTES]
    first = place[:KEY_BYTES]
    rest = place[KEY_BYTES:-_OLD_TAIL_BYTES]
    return first * FINE_CHUNKS + rest if rest else first  # a prompt of a single chunk


def shared_bytes(one: bytes, other: bytes) -> int:
    """Common prefix of two prompts in bytes, in whole chunks, unless checksums collide."""
    ours = stored_prefix_key(one)
    theirs = stored_prefix_key(other)
    chunks = 0
    while chunks < MAX_CHUNKS - 1 and (chunk := ours[KEY_BYTES * chunks : KEY_BYTES * (chunks + 1)]):
        if chunk != theirs[KEY_BYTES * chunks : KEY_BYTES * (chunks + 1)]:
            break
        chunks += 1
    return ENDS[chunks]


def alone(identity: bytes, job: int) -> bytes:
    """A unique identity for a job, for batches in which every line must be computed."""
    return sha256(b"alone\n" + identity + job.to_bytes(8, "big")).digest()


def owned(identity: bytes, owner: str) -> bytes:
    """The identity of the same request for one owner, so that answers are not reused for other owners."""
    return sha256(b"owned\n" + owner.encode() + b"\n" + identity).digest()


def _parts(values: Mapping[str, Any]) -> list[str]:
    """One text for tools and template arguments, then three for each message: role, content, other keys."""
    parts = [""]
    if not _PREAMBLE_KEYS.isdisjoint(values):
        parts = [compact_json({key: values[key] for key in _PREAMBLE if key in values})]
    for message in values["messages"]:
        content = message.get("content")
        if len(message) == 2 and type(content) is str:
            parts += (message["role"], content, "")
        else:
            parts += _rich_parts(message, content)
    return parts


def _rich_parts(message: Mapping[str, Any], content: Any) -> Iterable[str]:
    rest = {key: message[key] for key in sorted(message) if key not in ("role", "content")}
    text = content if isinstance(content, str) else ""
    if not isinstance(content, str):
        rest["content"] = content  # distinguishes it from an equal string
        text = "\n".join(map(_part_text, content or ()))
    return message["role"], text, compact_json(rest) if rest else ""


def _part_text(part: Mapping[str, Any]) -> str:
    value = part[part["type"]]
    return value if isinstance(value, str) else compact_json(value)


@lru_cache(1024)  # most files have one set of values on all lines
def _header(model_id: str, endpoint: Endpoint, sampling: tuple[tuple[str, Any], ...]) -> bytes:
    return f"{_FORM}\n{len(model_id)} {model_id}\n{endpoint}\n{compact_json(sorted(sampling))}\n".encode()
