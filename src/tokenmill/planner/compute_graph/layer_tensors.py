"""Tensors of a model by layer and short name: the input of every graph."""

from tokenmill.model.profile import Profile, Tensor

TensorTable = dict[int, dict[str, Tensor]]
_KEPT = 4  # the same few models (and their quantisations) are looked up repeatedly
_kept: list[
    tuple[tuple[Tensor, ...], TensorTable]
] = []  # compared by identity: hashing a thousand tensors costs as much as sorting them


def by_layer(profile: Profile) -> TensorTable:
    """Tensors of each layer by short name: `attn_q`, `ffn_down_exps`. The result is shared; do not modify it."""
    for tensors, table in _kept:
        if tensors is profile.tensors:
            return table
    table = {}
    for tensor in profile.tensors:
        if tensor.layer is not None:
            short = tensor.name.split(f"{tensor.layer}.", 1)[1].removesuffix(".weight")
            table.setdefault(tensor.layer, {})[short] = tensor
    _kept.insert(0, (profile.tensors, table))
    del _kept[_KEPT:]
    return table
