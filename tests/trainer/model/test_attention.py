import random

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from miles.trainer.data.packing import MicroBatch
from miles.trainer.model.attention import FLEX_MULTIPLE, tree_mask
from miles.trainer.model.layout import lay_out
from tests.trainer.conftest import rows_of


def a_trie():
    """Ends of a trie of several blocks, from rows that share prefixes of many lengths."""
    dice = random.Random(0)
    rows = rows_of(0, (300, 200, 250, 30), shared=150) + rows_of(1, (100, 90), shared=40)
    rows += rows_of(0, (dice.randrange(5, 300),) * 3, shared=150)
    return lay_out(MicroBatch(rows=tuple(rows), packed=True), torch.device("cpu"), multiple=FLEX_MULTIPLE)


def test_blocks_from_the_ends_are_those_of_the_whole_mask():
    end = a_trie().end

    def sees(batch, head, q, k):
        return (q >= k) & (q < end[k])

    expected = create_block_mask(sees, None, None, len(end), len(end), device="cpu")
    found = tree_mask(end, "flex_attention")
    assert len(end) > 6 * FLEX_MULTIPLE
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
    assert found.to_dense().tolist() == expected.to_dense().tolist()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # the unfused form is what CPUs have
def test_flex_attention_over_a_trie_is_the_masked_attention():
    layout = a_trie()
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, len(layout.end), 16) for _ in range(3))
    expected = scaled_dot_product_attention(q, k, v, attn_mask=tree_mask(layout.end, "sdpa"))
    found = flex_attention(q, k, v, block_mask=tree_mask(layout.end, "flex_attention"))
    assert torch.allclose(found, expected, atol=1e-5)


def test_what_fills_a_trie_up_sees_itself_and_nobody_sees_it():
    layout = a_trie()
    mask = tree_mask(layout.end, "sdpa")[0, 0].numpy()
    last = int(layout.picks.max()) + 2
    filled = np.arange(last, len(layout.end))
    assert len(filled) > 0
    assert mask[filled][:, filled].tolist() == np.eye(len(filled), dtype=bool).tolist()
    assert not mask[:last, last:].any()
