"""Tensors of a model by layer and short name, from which every graph is built."""

from tokenmill.model.profile import Profile, Tensor

TensorTable = dict[int, dict[str, Tensor]]
_MAX_CACHED = 4
# Keys are compared by identity: hashing a thousand tensors takes as long as building their table.
_cached: list[tuple[tuple[Tensor, ...], TensorTable]] = []


def by_layer(profile: Profile) -> TensorTable:
    """Tensors of each layer by short name: `attn_q`, `ffn_down_exps`. The result is shared; do not modify it."""
    for tensors, table in _cached:
        if tensors is profile.tensors:
            return table
    table = {}
    for tensor in profile.tensors:
        if tensor.layer is not None:
            short = tensor.name.split(f"{tensor.layer}.", 1)[1].removesuffix(".weight")
            table.setdefault(tensor.layer, {})[short] = tensor
    _cached.insert(0, (profile.tensors, table))
    del _cached[_MAX_CACHED:]
    return table
