"""Tensors of a model by layer and short name, which every graph is drawn from."""

from tokenmill.model.profile import Profile, Tensor

TensorTable = dict[int, dict[str, Tensor]]
_KEPT = 4  # one model is asked about again and again, its smaller quantisations a few times
_kept: list[
    tuple[tuple[Tensor, ...], TensorTable]
] = []  # by identity: hashing a thousand tensors costs as much as sorting


def by_layer(profile: Profile) -> TensorTable:
    """Tensors of each layer by their short names: `attn_q`, `ffn_down_exps`. Shared: not to be changed."""
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
