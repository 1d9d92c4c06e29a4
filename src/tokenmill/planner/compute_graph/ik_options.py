"""What ik_llama.cpp is told on its command line, and what its builds do differently, as far as memory goes.

Dates are those of its pull requests: the mask in 16 bits (autumn 2025), attention of each group of heads at once
(ik#1211, January 2026), `--fit` (ik#1501, March 2026), `-ts` respected (ik#1540, three days later),
`--gpu-fit-margin` (ik#1872, May 2026), `-amb 256` by default (ik#2312, August 2026).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IkOptions:
    """Flags of ik_llama.cpp that move memory, and the habits of a build; the defaults are those of today's."""

    mla: int = 3  # 3: prompts expand K and V out of the latent cache, single tokens do not; 1: never; 0: none is kept
    amb_mib: int = 256  # what expanding may take at once, in MiB; 0: no limit
    fmoe: bool = True  # up and gate of the experts in one operation, so both are copied in together
    muge: bool = False  # up and gate merged into one tensor while loading
    rtr: bool = False  # host tensors repacked while loading; a GPU cannot read them any more
    fused_sum: bool = True  # experts weighed and added up in one operation
    half_mask: bool = True  # the mask is made in 16 bits, not made in 32 and converted by the first GPU
    by_groups: bool = True  # each group of heads is attended to before the next is expanded
    nccl: bool = True  # built with NCCL, whose communicators take memory on every GPU from the start
    fit_counts_compute: bool = False  # --fit takes the compute buffer off what it hands out, not the margin alone
    fit_margin_each: bool = True  # one margin for each GPU; before, of "12000,12550" only 12000 was read


IK_2025 = IkOptions(amb_mib=0, fused_sum=False, half_mask=False, by_groups=False, nccl=False)
"""Up to October 2025."""

IK_FIRST_FIT = IkOptions(amb_mib=0, fit_counts_compute=True, fit_margin_each=False)
"""The first three days of `--fit`, 25 to 28 March 2026."""

IK_SPRING_2026 = IkOptions(amb_mib=0, fit_margin_each=False)
"""From 28 March 2026, when the compute buffer fell out of `--fit`, to May."""
