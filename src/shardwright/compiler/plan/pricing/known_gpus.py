"""Which GPUs the shipped profiles were made for, by the names that their driver gives them.

A name has to fit whole. Boards that share a letter and a number share little else: an H100 PCIe or NVL has neither the
memory nor the links of an SXM board, an RTX A1000 is no A100, and a slice of a GPU (MIG) is a small one.
"""

from __future__ import annotations

import re

_NAMES = {
    "v100": r"V100-SXM[23]-(16|32)GB(-LS)?",
    "a100": r"A100-SXM4-(40|80)GB",
    "h100": r"H100 80GB HBM3",
    "h200": r"H200",
}


def profile_of(device_name: str) -> str | None:
    """The name of the shipped profile of such GPUs, None where there is none.

    >>> [profile_of(name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA RTX A1000")]
    ['h100', None, None]
    """
    model = re.sub(r"^(NVIDIA|Tesla) ", "", device_name.strip())
    return next((profile for profile, names in _NAMES.items() if re.fullmatch(names, model)), None)
