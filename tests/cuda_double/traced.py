"""What a compiler relies on, checked as vLLM traces a model: Dynamo and vLLM's own backend, with its cuts and captures.

Inductor generates code for a GPU that is there, so torch runs the graphs as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.cuda_double import graphs
from tests.cuda_double.checks import launches, need


def without_inductor(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile``: Dynamo traces, and torch runs the graph as it is. vLLM compiles small functions so."""

    def compile(model: Any = None, *, backend: Any = "inductor", options: Any = None, **named: Any) -> Any:
        if backend == "inductor":
            backend = "eager"
        else:
            named["options"] = options
        return compiled(model, backend=backend, **named)

    return compile


def check_description(func: Any, given: Any, out: Any, described: Any) -> None:
    """Require that an operator returns new tensors as it describes them to a compiler, which relies on shapes and strides."""
    storages = {t.untyped_storage()._cdata for t in tree_leaves(given) if isinstance(t, Tensor)}
    for real, fake in zip(tree_leaves(out), tree_leaves(described), strict=True):
        for what in ("shape", "dtype", "device", "stride"):
            one, other = (getattr(t, what)() if what == "stride" else getattr(t, what) for t in (real, fake))
            need(one == other, func, "returns", what, one, "and describes", other)
        need(real.untyped_storage()._cdata not in storages, func, "returns an input")


def check_graph(call: Callable[..., Any]) -> Callable[..., Any]:
    """``VllmBackend.__call__``: weights are arguments of its graph, and the plugin's settings part of the name on disk."""

    def checked(self: Any, graph: Any, inputs: Any) -> Any:
        constants = [node.target for node in graph.graph.nodes if node.op == "get_attr"]
        need(not constants, "constants of a graph:", constants)
        config = self.vllm_config
        need(config.quant_config is None or "jetrl_patch" in config.additional_config, "a graph without a name of its own")
        launches["compiled"] += 1
        return call(self, graph, inputs)

    return checked


def check_reads(layers: Any, blocks: str) -> None:
    """Captured graphs read the weights and scales of quantized layers where a weight sync writes them, and no copies."""
    for layer, method in layers:
        scales = [layer.weight_scale_inv] + [t for name, t in layer.named_buffers() if name == blocks]
        for held in ([layer.weight], scales):
            read = any(t.untyped_storage()._cdata in graphs.Graph.read for t in held)
            need(read, "no graph reads", method.prefix, [list(t.shape) for t in held])


def install() -> None:
    """Let vLLM compile, in a process of its own."""
    from vllm.compilation.backends import VllmBackend

    os.environ["VLLM_USE_AOT_COMPILE"] = "0"  # of which vLLM writes files in a folder for all
    torch._dynamo.config.disable = False
    torch.version.cuda = "13.0"  # vLLM hashes it
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()  # Dynamo keeps both
    torch.cuda.set_rng_state = lambda state, device=None: None
    VllmBackend.__call__ = check_graph(VllmBackend.__call__)  # type: ignore[method-assign]
