"""What is chosen from, and what is chosen."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Logits: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.int32]
