"""The mathematics under the accountants; nothing here knows an event."""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
