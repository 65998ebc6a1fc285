"""The type of the arrays that bounds of many candidates are computed in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
