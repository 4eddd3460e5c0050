"""Which experts a mixture-of-experts model used, as engines record it and trainers replay it: arrays to text and back.

The words (`Routing`) are those of `miles.types`. Nothing here needs torch.
"""

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles.errors import TrainerError
from miles.types import Routing

__all__ = ["decode_routing", "encode_routing"]

_WIDTHS: dict[int, str] = {1: "<u1", 2: "<u2", 4: "<u4"}


def encode_routing(experts_TLK: NDArray[np.integer[Any]]) -> Routing:
    """(tokens, layers, k) of expert numbers, -1 where not recorded, in the fewest bytes that hold the largest one."""
    most = int(experts_TLK.max(initial=0))
    width = 1 if most < 255 else 2 if most < 65535 else 4
    data = base64.b64encode(np.ascontiguousarray(experts_TLK.astype(_WIDTHS[width])).tobytes()).decode()
    tokens, layers, top_k = experts_TLK.shape
    return Routing(tokens=tokens, layers=layers, top_k=top_k, width=width, data=data)  # type: ignore[arg-type]


def decode_routing(routing: Routing) -> NDArray[np.int64]:
    """The inverse of `encode_routing`; TrainerError when the data has another size than it says."""
    shape = (routing.tokens, routing.layers, routing.top_k)
    raw = np.frombuffer(base64.b64decode(routing.data), dtype=_WIDTHS[routing.width])
    if raw.size != np.prod(shape):
        raise TrainerError(f"recorded routing has {raw.size} entries, {shape} need {np.prod(shape)}; record it again")
    experts = raw.reshape(shape).astype(np.int64)
    experts[experts == np.iinfo(_WIDTHS[routing.width]).max] = -1
    return experts
