"""Host values on the device, by one copy that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def staged(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return integers of the host as a tensor on `device`, without waiting for the device.

    The copy goes through pinned memory, which torch does not use again before the copy has ended.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.long, device=device)
    return torch.tensor(values, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)
