"""Experts as text and back."""

import base64

import numpy as np
import pytest

from miles.errors import TrainerError
from miles.routing import decode_routing, encode_routing
from miles.types import Routing


@pytest.mark.parametrize(("largest", "width"), [(7, 1), (254, 1), (255, 2), (1000, 2), (70_000, 4)])
def test_routing_survives_its_encoding_in_the_fewest_bytes(largest, width):
    experts = np.array([[[0, largest], [3, -1]], [[1, 2], [-1, -1]]])
    routing = encode_routing(experts)
    assert (routing.tokens, routing.layers, routing.top_k, routing.width) == (2, 2, 2, width)
    assert (decode_routing(routing) == experts).all()


def test_data_of_another_size_is_refused():
    with pytest.raises(TrainerError, match="record it again"):
        decode_routing(Routing(tokens=2, layers=1, top_k=1, width=1, data=base64.b64encode(b"\1").decode()))
