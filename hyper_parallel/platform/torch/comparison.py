# SPDX-License-Identifier: Apache-2.0
"""torch.testing.assert_close with distributed tensors: the wholes are compared, so all ranks call it together.

torch decides by ``tensor.layout``, which for a distributed tensor is where it lies on its mesh. So this stands in for
the class that compares two tensors; for plain tensors it is that class.
"""

from __future__ import annotations

from typing import Any

import torch.testing._comparison
from torch.testing._comparison import TensorLikePair

from hyper_parallel.platform.torch.dtensor_base import DTensorBase


class WholePair(TensorLikePair):
    """Two tensors that are compared, of which any may be distributed."""

    def __init__(self, actual: Any, expected: Any, **options: Any) -> None:
        super().__init__(_whole(actual), _whole(expected), **options)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensorBase) else value


torch.testing._comparison.TensorLikePair = WholePair  # type: ignore[misc]
