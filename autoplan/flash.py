"""Flash attention: the limit of its CUDA kernels that the runtime obeys and the rules of saved memory know."""

from __future__ import annotations

LARGEST_HEAD = 256  # larger head dims take another kernel
