"""Memory bandwidth of well-known GPUs, for drivers that do not report bus width and clock.

Figures are the vendor's, in decimal GB/s, from the product page or data sheet in the last column. A name must match the
driver's exactly, except for the vendor, because `GeForce RTX 3090` and `GeForce RTX 3090 Ti` differ. Names that cover
several bus widths (GeForce RTX 3060, all laptop GPUs) are not listed.
"""

import re

_TABLE = """
GeForce GTX 1080 Ti             484    NVIDIA GeForce GTX 1080 Ti product page
GeForce RTX 2080 Ti             616    NVIDIA Turing architecture white paper
GeForce RTX 3090                936    NVIDIA Ampere GA102 white paper
GeForce RTX 3090 Ti             1008   NVIDIA GeForce RTX 3090 Ti product page
GeForce RTX 4090                1008   NVIDIA Ada GPU architecture white paper
GeForce RTX 5090                1792   NVIDIA RTX Blackwell architecture white paper
RTX A6000                       768    NVIDIA RTX A6000 data sheet
RTX 6000 Ada Generation         960    NVIDIA RTX 6000 Ada data sheet
RTX PRO 6000 Blackwell Workstation Edition  1792  NVIDIA RTX PRO 6000 Blackwell data sheet
RTX PRO 6000 Blackwell Max-Q Workstation Edition  1792  NVIDIA RTX PRO 6000 Blackwell Max-Q data sheet
Tesla P40                       346    NVIDIA Tesla P40 data sheet
Tesla V100-SXM2-16GB            900    NVIDIA V100 data sheet
Tesla V100-SXM2-32GB            900    NVIDIA V100 data sheet
A100-SXM4-40GB                  1555   NVIDIA A100 data sheet
A100-SXM4-80GB                  2039   NVIDIA A100 80GB data sheet
A100 80GB PCIe                  1935   NVIDIA A100 80GB data sheet
L40S                            864    NVIDIA L40S data sheet
Radeon VII                      1024   AMD Radeon VII product page
Radeon Instinct MI50            1024   AMD Radeon Instinct MI50 data sheet
Instinct MI100                  1229   AMD Instinct MI100 brochure
Instinct MI300X                 5300   AMD Instinct MI300X data sheet
Radeon RX 6800 XT               512    AMD Radeon RX 6800 XT product page
Radeon RX 6900 XT               512    AMD Radeon RX 6900 XT product page
Radeon RX 7900 XT               800    AMD Radeon RX 7900 XT product page
Radeon RX 7900 XTX              960    AMD Radeon RX 7900 XTX product page
Radeon PRO W7900                864    AMD Radeon PRO W7900 data sheet
Radeon AI PRO R9700             640    AMD Radeon AI PRO R9700 data sheet
"""
_ROWS = [re.split(r"\s{2,}", line, maxsplit=2) for line in _TABLE.strip().splitlines()]
_KNOWN = {name.casefold(): (float(gb_s), source) for name, gb_s, source in _ROWS}


def nominal(name: str) -> tuple[float, str] | None:
    """Return (GB/s, source) for a GPU's marketing name; None if it is not listed."""
    return _KNOWN.get(re.sub(r"^(nvidia|amd)\s+", "", name.strip(), flags=re.IGNORECASE).casefold())
