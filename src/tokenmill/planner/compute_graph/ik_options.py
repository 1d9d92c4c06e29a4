"""Options of ik_llama.cpp that affect memory, and the differences between its builds.

Dates are those of its pull requests: 16-bit mask (autumn 2025), attention computed per group of attention heads
(ik#1211, January 2026), `--fit` (ik#1501, March 2026), `-ts` respected (ik#1540, three days later),
`--gpu-fit-margin` (ik#1872, May 2026), default `-amb 256` (ik#2312, August 2026).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IkOptions:
    """Flags and build properties that affect memory; the defaults are those of the current version."""

    mla: int = 3  # 3: only prompts expand K and V from the latent cache; 1: never expanded; 0: no latent cache
    amb_mib: int = 256  # maximum size of one expansion, in MiB; 0: no limit
    fmoe: bool = True  # one operation computes up and gate of the experts, so both are copied together
    muge: bool = False  # up and gate merged into one tensor while loading
    rtr: bool = False  # host tensors are repacked while loading; GPUs cannot read them afterwards
    fused_sum: bool = True  # experts are weighted and summed in one operation
    half_mask: bool = True  # the mask is created in 16 bits; False: in 32, and the first GPU converts it
    by_groups: bool = True  # attention finishes one group of attention heads before the next is expanded
    experts_used: int | None = None  # -ser: experts per token, fewer than the model's
    nccl: bool = True  # built with NCCL, whose communicators take memory on every GPU from the start
    fit_counts_compute: bool = False  # --fit subtracts the compute buffer and the margin from free memory
    fit_margin_each: bool = True  # one margin per GPU; older builds read only 12000 of "12000,12550"


IK_2025 = IkOptions(amb_mib=0, fused_sum=False, half_mask=False, by_groups=False, nccl=False)
"""Until October 2025."""

IK_FIRST_FIT = IkOptions(amb_mib=0, fit_counts_compute=True, fit_margin_each=False)
"""The first three days of `--fit`, 25 to 28 March 2026."""

IK_SPRING_2026 = IkOptions(amb_mib=0, fit_margin_each=False)
"""From 28 March 2026, when `--fit` stopped counting the compute buffer, to May."""
