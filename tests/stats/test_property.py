"""Two thousand random calls against the reference: masks, windows, softcaps, sinks, head groups, lengths, dtypes."""

import numpy as np
import pytest
import torch

from attnmon.stats.api import attention_stats
from attnmon.stats.reference import attention_stats as reference
from tests.helpers import assert_stats_close, call_id, draw_call, slow_but

CALLS_PER_CASE = 100
LENGTHS = [1, 2, 3, 5, 7, 16, 17, 24, 31]


@pytest.mark.parametrize("case", slow_but((0,), range(20)))
def test_any_call_agrees_with_the_reference(case):
    for seed in range(case * CALLS_PER_CASE, (case + 1) * CALLS_PER_CASE):
        rng = np.random.default_rng(10_000 + seed)
        q_len = int(rng.choice(LENGTHS))
        k_len = q_len if rng.random() < 0.7 else int(rng.choice(LENGTHS))
        call = draw_call(rng, q_len=q_len, k_len=k_len, **({"packed": False} if k_len != q_len else {}))
        _avoid_saturation(call)
        rtol = 1e-5 if call["query"].dtype == torch.float32 else 1e-4
        assert_stats_close(attention_stats(**call), reference(**call), rtol, context=f"seed {seed}: {call_id(call)}")


def _avoid_saturation(call):
    """A softcap far below the logits makes weights tie within float64's last digit, and then which of them is
    selected depends on whose tanh it was; ``test_streaming.py`` allows for that, here nothing is allowed for."""
    if "softcap" in call:
        scale = call.get("scale", call["query"].shape[-1] ** -0.5)
        keys = call["key"].double().repeat_interleave(call["query"].shape[1] // call["key"].shape[1], 1)
        largest = float((call["query"].double() @ keys.transpose(-1, -2)).abs().max()) * scale
        call["softcap"] = max(call["softcap"], largest / 4)
