import sys
import types

import pytest
import torch.nn.functional as F


@pytest.fixture(autouse=True)
def nothing_stays_replaced():
    """Whatever a test does, torch's functions are its own again afterwards."""
    yield
    module = sys.modules.get("torch.nn.attention.flex_attention")
    for function in (F.multi_head_attention_forward, F.softmax, getattr(module, "flex_attention", F.softmax)):
        assert "attnmon" not in function.__code__.co_filename, f"{function.__name__} is still replaced"
    assert isinstance(F.scaled_dot_product_attention, types.BuiltinFunctionType)
