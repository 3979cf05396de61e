"""What verl's Megatron engine needs on a CPU: Megatron-Core, with gloo, without TransformerEngine, Apex or flash attention.

Megatron names CUDA in many places. In a process that imports verl's Megatron engine, the modules of Megatron and of mbridge get a
``torch`` of their own, whose CUDA calls answer for the CPU. No other module sees it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from typing import Any

from jetrl_patch.patching.guards import is_installed
from jetrl_patch.patching.journal import Journal
from jetrl_patch.patching.patch import NO_REPORT, OnImport, constant

ENGINE = "verl.workers.engine.megatron.transformer_impl"

_TE = "transformer_engine"
#: where Megatron-Bridge picks TransformerEngine's layers, although Megatron-Core has local ones
_PROVIDER = "megatron.bridge.models.gpt_provider"
_PACKAGES = ("megatron", "mbridge")
#: modules that verl's engine imports later, while it runs
_LATER = (
    "megatron.core.distributed", "megatron.core.distributed.finalize_model_grads", "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler", "megatron.core.pipeline_parallel.schedules", "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt", "megatron.core.tensor_parallel", "mbridge",
)  # fmt: skip
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "as_tensor", "zeros_like", "empty_like")
_REASON = "Megatron-Core has no CPU platform: it names CUDA devices, types and random states"


class _InFrontOf(types.ModuleType):
    """A module that passes every attribute on, except its own."""

    def __init__(self, real: types.ModuleType, **own: Any) -> None:
        super().__init__(real.__name__)
        vars(self).update(own, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_real"], name)


class _Stream:
    """A CUDA stream that has nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = record_event = synchronize = constant(None)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _scatter(tensor: Any, scatter_list: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``torch.distributed.scatter`` of dense parts: gloo sends the memory behind a slice. A copy to a GPU would pack it."""
    import torch

    dense = scatter_list and [part.contiguous() for part in scatter_list]
    return torch.distributed.scatter(tensor, dense, *args, **kwargs)


def _torch() -> types.ModuleType:
    """The ``torch`` that Megatron's modules get."""
    import torch

    cpu, generator = torch.device("cpu"), torch.default_generator
    cuda = _InFrontOf(
        torch.cuda,
        current_device=lambda: cpu, device_count=lambda: 0, is_available=lambda: False,
        set_device=lambda device: None, synchronize=lambda *_: None, empty_cache=lambda: None,
        get_rng_state=lambda *_, **__: generator.get_state(), set_rng_state=lambda state, *_, **__: generator.set_state(state),
        manual_seed=torch.manual_seed,
        Stream=_Stream, current_stream=lambda *_: _Stream(), stream=lambda _: contextlib.nullcontext(),
    )  # fmt: skip
    distributed = _InFrontOf(torch.distributed, scatter=_scatter)
    return _InFrontOf(torch, cuda=cuda, distributed=distributed, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})


@contextlib.contextmanager
def _cuda_types() -> Iterator[None]:
    """Within the block ``Tensor.type()`` returns the names of CUDA types, which Megatron's optimizers compare."""
    import torch

    original = torch.Tensor.type

    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    torch.Tensor.type = named
    try:
        yield
    finally:
        torch.Tensor.type = original


def _among_cuda_types(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _cuda_types():
            return original(*args, **kwargs)

    return call


def _with_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DistributedOptimizer.sharded_state_dict``, which a fresh optimizer calls to load: torch's AdamW has no states yet.

    Megatron creates them only for the optimizers of TransformerEngine and Apex.
    """

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        adam = self.optimizer
        for parameter in (p for group in adam.param_groups for p in group["params"] if not adam.state[p]):
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            adam.state[parameter] = {"step": torch.zeros(()), **moments}
        return original(self, *args, **kwargs)

    return call


def _with_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DistributedOptimizer.load_state_dict``: Megatron saves torch's step count in the parameter group, and leaves it."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        import torch

        original(self, *args, **kwargs)
        for group in self.optimizer.param_groups:
            count = float(group.pop("step"))
            for parameter in group["params"]:
                self.optimizer.state[parameter]["step"] = torch.tensor(count)  # one each, because AdamW adds to it in place

    return call


def _with_causal_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DotProductAttention.forward``: verl's mask [B, T] is for TransformerEngine; this one takes what to hide."""

    @functools.wraps(original)
    def call(self: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if attention_mask is not None:
            later = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
            attention_mask = later | ~attention_mask.bool()[:, None, None]
        return original(self, query, key, value, attention_mask, *args, **kwargs)

    return call


def _itself(self: Any, *_: Any, **__: Any) -> Any:
    return self


class _Names(type):
    """A class with every attribute, for annotations and base classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (), {})


class _NoTransformerEngine(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules of TransformerEngine that have every name, and compute nothing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == _TE else None

    def exec_module(self, module: types.ModuleType) -> None:
        everything = functools.partial(getattr, _Names("transformer_engine", (), {}))
        vars(module).update(__version__="0.0.0", __getattr__=everything)  # Megatron-Core's version of one that is not installed


@contextlib.contextmanager
def _without_transformer_engine() -> Iterator[None]:
    """Within the block TransformerEngine seems to be installed. Megatron-Bridge imports it unconditionally."""
    finder = _NoTransformerEngine()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == _TE]:
            del sys.modules[name]


def prepare(engine: types.ModuleType, journal: Journal) -> None:
    """Let Megatron run on this CPU. Called when verl's engine has been imported."""
    import torch

    for name in _LATER:
        if is_installed(name):
            importlib.import_module(name)
    if is_installed("megatron.bridge") and not is_installed(_TE):  # Megatron-Core has found none by now
        with _without_transformer_engine():
            importlib.import_module("megatron.bridge")
    record = {"reason": _REASON, "remove_when": HOOK.remove_when}
    if (provider := sys.modules.get(_PROVIDER)) is not None and not is_installed(_TE):
        name = "transformer_engine_layer_spec"
        journal.set_attr(provider, name, provider.local_layer_spec, target=f"{_PROVIDER}.{name}", **record)
        attention = importlib.import_module("megatron.core.transformer.dot_product_attention").DotProductAttention
        masked = _with_causal_mask(attention.forward)
        journal.set_attr(attention, "forward", masked, target=f"{attention.__module__}.DotProductAttention.forward", **record)
    held = [m for name, m in list(sys.modules.items()) if name.split(".")[0] in _PACKAGES and vars(m).get("torch") is torch]
    own = _torch()

    def give(which: types.ModuleType) -> None:
        for module in held:
            vars(module)["torch"] = which

    give(own)
    journal.add_undo(lambda: give(torch), target="the name torch in Megatron's modules", **record)
    for owner, method in ((torch.Tensor, "cuda"), (torch.nn.Module, "cuda"), (torch.Tensor, "pin_memory")):
        journal.set_attr(owner, method, _itself, target=f"torch.{owner.__name__}.{method}", **record)
    path, name = "megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer"  # verl's default, which its sync needs
    kind = getattr(sys.modules[path], name)
    changed = {"__init__": _among_cuda_types, "sharded_state_dict": _with_states, "load_state_dict": _with_steps}
    for method, wrapped in changed.items():
        replaced = wrapped(getattr(kind, method))
        journal.set_attr(kind, method, replaced, target=f"{path}.{name}.{method}", **record)
    optimizer, clip = sys.modules["megatron.core.optimizer.optimizer"], "clip_grad_by_total_norm_fp32"
    among = _among_cuda_types(getattr(optimizer, clip))
    journal.set_attr(optimizer, clip, among, target=f"{optimizer.__name__}.{clip}", **record)
    random = sys.modules["megatron.core.tensor_parallel.random"]
    states = {"_get_cuda_rng_state": own.cuda.get_rng_state, "_set_cuda_rng_state": own.cuda.set_rng_state}
    for name, function in states.items():
        journal.set_attr(random, name, function, target=f"{random.__name__}.{name}", **record)
    seed_all = engine.set_random_seed

    def seeded(seed: int) -> None:
        """verl skips Megatron's generators without an accelerator, and Megatron's layers then find none."""
        seed_all(seed)
        random.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)

    journal.set_attr(engine, "set_random_seed", seeded, target=f"{ENGINE}.set_random_seed", **record)


HOOK = OnImport(
    ENGINE, "Megatron on a CPU", prepare,
    reason=_REASON,
    remove_when="Megatron-Core takes the device from its caller, as megatron.core.utils.get_device_type_for_comm does for groups",
    upstream=NO_REPORT,
    needed_by="a run on a CPU",
)  # fmt: skip
