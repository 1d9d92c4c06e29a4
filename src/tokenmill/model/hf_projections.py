"""Reads off the tensor table how wide each layer's keys and values are."""

import re
from collections.abc import Iterable

from tokenmill.model.hf_cache import Projections
from tokenmill.model.hf_names import Place, storage
from tokenmill.model.profile import TensorClass
from tokenmill.model.safetensors_header import Stored

_OTHER_ATTENTION = re.compile(r"cross_attn|encoder_attn|crossattention|EncDecAttention|indexer")
_KEYS_OR_VALUES = re.compile(r"(?:k|v|kv|qkv|key|value|w_?k|w_?v|w_?kv|w_?qkv|w_pack|c_attn|query_key_value)(?:_|$)")
_RECURRENCE = re.compile(r"\.A_log$|\.conv1d\.|\.conv\.conv\.|\.time_(?:mix|decay)|\.(?:mamba|ssm)\.")


def projections(rows: Iterable[tuple[str, Stored, Place]]) -> Projections:
    """Collect the rows of `k_proj` and `v_proj`, and the layers that have attention at all."""
    widths: dict[str, dict[int, int]] = {"k_proj": {}, "v_proj": {}}
    queries = set[int]()
    keys = set[int]()
    stateful = set[int]()
    attending = set[int]()
    for name, stored, place in rows:
        if place.cls is not TensorClass.ATTENTION or place.layer is None or _OTHER_ATTENTION.search(name):
            continue
        attending.add(place.layer)
        module, part = storage(name)
        leaf = module.rpartition(".")[2]
        if _RECURRENCE.search(name):
            stateful.add(place.layer)
        if leaf == "q_proj":
            queries.add(place.layer)
        elif _KEYS_OR_VALUES.match(leaf.lower()):
            keys.add(place.layer)
        if leaf in widths and (width := _rows(part, stored)):
            # A matrix says it better than the scales of AWQ and GPTQ, which come without one.
            if part == "scales":
                widths[leaf].setdefault(place.layer, width)
            else:
                widths[leaf][place.layer] = width
    return Projections(
        k_rows=widths["k_proj"],
        v_rows=widths["v_proj"],
        query_only=frozenset(queries - keys),
        stateful=frozenset(stateful - queries - keys),
        attending=frozenset(attending),
    )


def _rows(part: str, stored: Stored) -> int | None:
    """Rows of a projection: the outputs it has. Flattened matrices (bitsandbytes) do not tell."""
    if len(stored.shape) != 2:
        return None
    rows, columns = stored.shape
    if part in ("weight", "weight_packed"):
        return rows if columns > 1 else None
    return columns if part == "scales" and stored.dtype in ("F16", "BF16", "F32") else None
