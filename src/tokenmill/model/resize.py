"""A model of another size: the same tensors, with the bytes of the large matrices scaled.

For quantizations of which only the size of the file or the bits per weight is known. The types stay those of the
nearest known mix, so that the cost of unpacking is about right.
"""

from dataclasses import replace

from tokenmill.model.profile import Profile, Tensor, TensorClass

_KEPT_BITS = 16  # tensors with as many bits are norms, routers and other small ones that no mix quantizes


def resized(profile: Profile, size_bytes: int) -> Profile:
    """The model with `size_bytes` of tensors.

    Routed experts take the difference if there are any, because mixes of one model differ mostly in them; otherwise all
    quantized matrices do. Raises `ValueError` if the rest alone is larger.
    """
    routed = any(tensor.cls is TensorClass.ROUTED_EXPERTS for tensor in profile.tensors)

    def scales(tensor: Tensor) -> bool:
        if routed:
            return tensor.cls is TensorClass.ROUTED_EXPERTS
        return len(tensor.shape) > 1 and 8 * tensor.bytes < _KEPT_BITS * tensor.elements

    scaled = sum(tensor.bytes for tensor in profile.tensors if scales(tensor))
    kept = profile.bytes - scaled
    if scaled == 0 or size_bytes <= kept:
        raise ValueError(f"{profile.name} cannot have {size_bytes} bytes")
    factor = (size_bytes - kept) / scaled
    tensors = tuple(
        replace(tensor, bytes=round(tensor.bytes * factor)) if scales(tensor) else tensor for tensor in profile.tensors
    )
    return replace(profile, tensors=tensors)
