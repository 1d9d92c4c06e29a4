"""How large the recurrent state of a Hugging Face model is: state-space, linear-attention and convolution layers.

One sequence keeps it whatever its length. Families that do not put its dimensions into config.json are not known here.
"""

from tokenmill.model.hf_config import Settings


def state_dtype(settings: Settings) -> str | None:
    """The type the config wants the state kept in, where it says."""
    return settings.word("mamba_ssm_dtype", "mamba_ssm_cache_dtype")


def state_bytes(settings: Settings, family: str) -> int | None:
    """Bytes of one sequence's recurrent state in one layer; None where the config does not say.

    The state proper is counted in 32-bit floats unless the config says 16, the convolution's tail in the
    weights' 16 bits, as vLLM keeps them.
    """
    state_size = 2 if (state_dtype(settings) or "").endswith("float16") else 4
    for rule in (_delta_net, _kimi_delta, _mamba2, _mamba1, _short):
        if (sizes := rule(settings, family)) is not None:
            state, convolution = sizes
            return state_size * state + 2 * convolution
    return None


_Sizes = tuple[int, int] | None  # elements of state, elements of the convolution's tail


def _delta_net(settings: Settings, _family: str) -> _Sizes:
    k_heads = settings.count("linear_num_key_heads")
    v_heads = settings.count("linear_num_value_heads")
    k_dim = settings.count("linear_key_head_dim")
    v_dim = settings.count("linear_value_head_dim")
    if not (k_heads and v_heads and k_dim and v_dim):
        return None
    tail = (settings.count("linear_conv_kernel_dim") or 1) - 1
    return v_heads * k_dim * v_dim, tail * (2 * k_heads * k_dim + v_heads * v_dim)


def _kimi_delta(settings: Settings, _family: str) -> _Sizes:
    part = settings.part("linear_attn_config")
    heads = part.count("num_heads")
    dim = part.count("head_dim")
    if not (heads and dim):
        return None
    tail = (part.count("short_conv_kernel_size") or 1) - 1
    return heads * dim * dim, tail * 3 * heads * dim


def _mamba2(settings: Settings, family: str) -> _Sizes:
    # Plain names only where no attention could claim them.
    heads = settings.count("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", *(["num_heads"] * (family == "mamba2")))
    dim = settings.count("mamba_head_dim", "mamba_d_head", "mamba_headdim", *(["head_dim"] * (family == "mamba2")))
    state = settings.count("ssm_state_size", "mamba_d_state", "state_size")
    if heads and not dim and (hidden := settings.count("hidden_size")):  # mamba_d_head: "auto"
        dim = (settings.count("mamba_d_ssm") or hidden * (settings.count("mamba_expand", "expand") or 2)) // heads
    if not (heads and dim and state):
        return None
    groups = settings.count("mamba_n_groups", "mamba_ngroups", "n_groups") or 1
    tail = (settings.count("mamba_d_conv", "conv_kernel") or 1) - 1
    return heads * dim * state, tail * (heads * dim + 2 * groups * state)


def _mamba1(settings: Settings, family: str) -> _Sizes:
    state = settings.count("mamba_d_state", "state_size")
    hidden = settings.count("hidden_size")
    if not (state and hidden):
        return None
    inner = settings.count("intermediate_size") if family in ("mamba", "falcon_mamba") else None
    inner = inner or hidden * (settings.count("mamba_expand", "expand") or 2)
    tail = (settings.count("mamba_d_conv", "conv_kernel") or 1) - 1
    return inner * state, tail * inner


def _short(settings: Settings, family: str) -> _Sizes:
    """Convolutions alone (lfm2), RecurrentGemma's linear unit, MiniMax's lightning attention."""
    hidden = settings.count("hidden_size")
    if hidden and (cache := settings.count("conv_L_cache")):
        return 0, hidden * (cache - 1)
    if family == "recurrent_gemma" and (width := settings.count("lru_width") or hidden):
        return width, width * ((settings.count("conv1d_width") or 1) - 1)
    heads = settings.count("num_attention_heads")
    dim = settings.count("head_dim")
    if heads and (family.startswith("minimax") or settings.numbers("attn_type_list")):
        dim = dim or (hidden or 0) // heads
        return heads * dim * dim, 0
    return None
