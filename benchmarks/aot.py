"""Compiles the fused kernels for devices that are not here, and reads what they need of those.

A call on the CPU tells which launches it would make; their signatures are compiled as a launch would compile them.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attnmon.call import make_call
from attnmon.stats.directions import direction_table
from attnmon.stats.fused import host
from attnmon.stats.fused.launch import CallLaunches, Launch
from attnmon.stats.packing import Packing
from attnmon.stats.plan import make_plan
from attnmon.stats.settings import Settings

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Case:
    """A kind of call to compile for; ``options`` are arguments of ``make_call``, ``settings`` those of ``Settings``."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 64
    value_dim: int | None = None
    heads: int = 8
    kv_heads: int = 8
    length: int = 1024
    options: tuple[tuple[str, Any], ...] = (("is_causal", True),)
    settings: tuple[tuple[str, Any], ...] = ()
    hidden: int | None = None


def launches_of(case: Case, target: str, splits: int = 8) -> list[Launch]:
    """The launches of a call of this kind on a target, its keys cut into ``splits`` parts."""
    rocm = target.startswith("gfx")
    with (
        patch.object(host, "on_rocm", lambda: rocm),
        patch.object(host, "interpreted", lambda: False),
        patch.object(host, "choose_splits", lambda *_: splits),
    ):
        return _launches_of(case)


def _launches_of(case: Case) -> list[Launch]:
    batch, length, dtype = 2, case.length, case.dtype

    def tensor(heads: int, width: int) -> Tensor:  # as models lay them out
        return torch.empty(batch, length, heads, width, dtype=dtype).transpose(1, 2)

    given = dict(case.options)
    masks = {
        "bool": torch.ones(1, 1, length, length, dtype=torch.bool),
        "float": torch.zeros(1, 1, length, length, dtype=dtype),
    }
    paddings = {
        "bool": torch.zeros(batch, length, dtype=torch.bool),
        "float": torch.zeros(batch, length, dtype=dtype),
    }
    if "attn_mask" in given:
        given["attn_mask"] = masks[given["attn_mask"]]
    if "key_padding_mask" in given:
        given["key_padding_mask"] = paddings[given["key_padding_mask"]]
    if "sinks" in given:
        given["sinks"] = torch.zeros(case.heads, dtype=dtype)
    if case.hidden is not None:
        given["hidden"] = torch.empty(batch, length, case.hidden, dtype=dtype)
    call = make_call(
        tensor(case.heads, case.head_dim),
        tensor(case.kv_heads, case.head_dim),
        tensor(case.kv_heads, case.value_dim or case.head_dim),
        **given,
    )
    settings = Settings.create(**dict(case.settings))
    plan, packing = make_plan(call, settings), Packing(settings.metrics)
    accumulator = torch.zeros(packing.num_columns, case.heads, dtype=torch.float64)
    assert call.query is not None
    assert call.key is not None
    planned = CallLaunches(
        accumulator=accumulator,
        query=call.query,
        key=call.key,
        tokens=host.tokens_of(call, settings),
        rows=host.row_table(call, plan),
        live=plan.live,
        attn_mask=call.attn_mask,
        key_padding_mask=call.key_padding_mask,
        sinks=call.sinks,
        table=direction_table(),
        scale=call.scale,
        softcap=call.softcap or 0.0,
        tau=call.tau,
        fd_epsilon=settings.fd_epsilon,
        first_sequence=0,
        sequence_step=1,
        top_n=settings.top_n,
        unit_tokens=settings.tokens != "value_raw",
        metrics=",".join(packing.metrics),
    )
    return list(planned.launches())


def source_of(launch: Launch) -> ASTSource:
    """The launch's kernel with the signature it would be specialized to."""
    kernel = launch.kernel
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    free = set(getattr(kernel, "do_not_specialize", None) or ())
    for index, name in enumerate(kernel.arg_names):
        if name not in launch.arguments:
            signature[name] = "constexpr"
            constants[(index,)] = launch.constants[name]
            continue
        given = launch.arguments[name]
        if isinstance(given, Tensor):
            signature[name] = _TYPES[given.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(given, float):
            signature[name] = "fp32"
        elif given == 1 and name not in free:
            signature[name] = "constexpr"
            constants[(index,)] = 1
        else:
            signature[name] = "i32" if -(2**31) <= given < 2**31 else "i64"
            if given % 16 == 0 and name not in free:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def compiled(launch: Launch, target: str) -> dict[str, int]:
    """Registers, bytes spilled to memory, and shared memory of a launch's machine code."""
    kernel = triton.compile(source_of(launch), target=TARGETS[target], options=dict(launch.options))
    usage = {"shared_bytes": int(kernel.metadata.shared), "warps": int(kernel.metadata.num_warps)}
    if target.startswith("sm"):
        usage.update(_cuda_usage(kernel.asm["cubin"]))
    else:
        usage.update(_rocm_usage(kernel.asm["amdgcn"]))
    return usage


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _cuda_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [_tool("cuobjdump"), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", text)
    assert found is not None, text
    # what is spilled lies on the stack, and so does nothing else of these kernels
    return {"registers": int(found[1]), "spilled_bytes": int(found[2]) + int(found[3])}


def _rocm_usage(assembly: str) -> dict[str, int]:
    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        assert found is not None, name
        return int(found[1])

    return {
        "registers": number("vgpr_count"),
        "spilled_bytes": number("private_segment_fixed_size"),
        "spilled_registers": number("vgpr_spill_count"),
        # lanes of vector registers take scalars that do not fit; no memory is involved
        "scalars_in_lanes": number("sgpr_spill_count"),
    }


def _options(**given: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(given.items())


_CAUSAL = _options(is_causal=True)

CASES = (
    Case("bf16 D64 causal"),
    Case("fp16 D64 causal", dtype=torch.float16),
    Case("fp32 D64 causal", dtype=torch.float32),
    Case("bf16 D128 causal, groups of 4", head_dim=128, heads=32),
    Case("fp32 D128 causal, groups of 4", dtype=torch.float32, head_dim=128, heads=32),
    Case("bf16 D16", head_dim=16, options=()),
    Case("bf16 D80", head_dim=80, options=()),
    Case("bf16 D96 window", head_dim=96, options=_options(is_causal=True, window=256)),
    Case("bf16 D192 Dv128 causal", head_dim=192, value_dim=128),
    Case("bf16 D256 causal", head_dim=256),
    Case("fp32 D256 causal", dtype=torch.float32, head_dim=256),
    Case("bf16 bool masks", options=_options(attn_mask="bool", key_padding_mask="bool")),
    Case("bf16 float masks", options=_options(attn_mask="float", key_padding_mask="float")),
    Case("fp32 float masks", dtype=torch.float32, options=_options(attn_mask="float", key_padding_mask="float")),
    Case("bf16 softcap and sinks", options=_options(is_causal=True, softcap=30.0, sinks=True)),
    Case(
        "bf16 all at once, groups of 4, D128",
        head_dim=128, heads=32,
        options=_options(is_causal=True, softcap=30.0, sinks=True, attn_mask="float", key_padding_mask="float"),
        settings=_options(fd_epsilon=10.0),
    ),
    Case(
        "fp32 all at once",
        dtype=torch.float32,
        options=_options(is_causal=True, softcap=30.0, sinks=True, attn_mask="float", key_padding_mask="float"),
        settings=_options(fd_epsilon=10.0),
    ),
    Case("bf16 large step", settings=_options(fd_epsilon=10.0)),
    Case("bf16 raw values", settings=_options(tokens="value_raw")),
    Case("bf16 hidden states", hidden=768, settings=_options(tokens="hidden")),
    Case("bf16 entropy alone", settings=_options(metrics=("entropy", "max_logit"))),
    Case("bf16 top 1", settings=_options(top_n=1)),
    Case("bf16 top 20", settings=_options(top_n=20)),
    Case("bf16 top 64", settings=_options(top_n=64)),
)  # fmt: skip
"""Kinds of calls whose kernels are compiled; between them they reach every flag of the kernels."""
