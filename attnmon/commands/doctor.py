"""``attnmon doctor``: what attnmon sees of a model, without training it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from attnmon.capture import coverage_table
from attnmon.errors import AttnmonError
from attnmon.run.monitor import watch


def run(target: str) -> int:
    """Print the coverage table of the model that ``target`` ("MODULE:FACTORY") names.

    The factory takes no arguments and returns a model, or a model and what to call it with (a tensor, a tuple of
    arguments or a dict of keyword arguments). With inputs, the model's ``dummy_inputs`` included, one forward is
    run in training mode and every attention module is "captured" or "skipped: reason"; without, all are "waiting".

    Returns:
        0 if nothing was skipped, otherwise 1.

    Raises:
        AttnmonError: the target cannot be imported or called, the model has no attention, or its forward fails.
    """
    model, inputs = _build(target)
    monitor = watch(model)
    if inputs is not None:
        model.train()
        try:
            with monitor.step():
                _call(model, inputs)
        except Exception as error:
            raise AttnmonError(
                f"calling the model of {target} with its inputs failed: {type(error).__name__}: {error}"
            ) from error
    records = monitor.coverage()
    print(coverage_table(records))
    if inputs is None:
        print(
            "\nNo forward was run. Let the factory return (model, inputs), inputs being a tensor, a tuple of arguments "
            "or a dict of keyword arguments, to see which calls are captured."
        )
    monitor.close()
    return int(any(record.status == "skipped" for record in records))


def _build(target: str) -> tuple[nn.Module, Any]:
    module_name, colon, factory_name = target.partition(":")
    if not (module_name and colon and factory_name):
        raise AttnmonError(f"the model is named as MODULE:FACTORY, such as mypackage.model:build; got {target!r}")
    sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise AttnmonError(f"cannot find {target}: {error}") from error
    finally:
        sys.path.pop(0)
    try:
        made = factory()
    except Exception as error:
        raise AttnmonError(f"{target}() failed: {type(error).__name__}: {error}") from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise AttnmonError(
            f"{target}() must return a torch.nn.Module, or one and its inputs; got {type(model).__name__}"
        )
    if inputs is None:
        inputs = getattr(model, "dummy_inputs", None)
    return model, inputs


def _call(model: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, Mapping):
        model(**inputs)
    elif isinstance(inputs, torch.Tensor):
        model(inputs)
    else:
        model(*inputs)
