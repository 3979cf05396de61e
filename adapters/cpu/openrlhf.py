"""What OpenRLHF 0.11.2 and DeepSpeed need to run on a CPU: patches, and a substitute for flash_attn."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from jetrl_patch import registry
from jetrl_patch.adapters.cpu import LOGICAL_GPUS, CpuPatch
from jetrl_patch.patching.guards import is_installed
from jetrl_patch.patching.patch import NO_REPORT, replacement
from jetrl_patch.registry import Journal, OnImport

# ---- A substitute for ``flash_attn``, which OpenRLHF imports unconditionally ----------------------
# It is in ``sys.modules`` only while ``openrlhf.models.ring_attn_utils`` is imported, so neither transformers nor vLLM mistakes
# it for flash attention.

_IMPORTER = "openrlhf.models.ring_attn_utils"


def stand_in(journal: Journal) -> None:
    """Make that import succeed, unless flash-attn is installed or the importer is already loaded."""
    if is_installed("flash_attn") or _IMPORTER in sys.modules:
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    journal.add_undo(
        lambda: sys.meta_path.remove(finder),
        target=f"sys.meta_path ({_IMPORTER})",
        reason="OpenRLHF imports flash_attn unconditionally, and the import fails on a CPU",
        remove_when="openrlhf.models.ring_attn_utils imports flash_attn inside the functions that use it",
    )


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == _IMPORTER else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _with_stand_in(spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _with_stand_in(execute: Any) -> Any:
    from einops import rearrange  # OpenRLHF needs it, the other frameworks do not

    functions: dict[str, dict[str, Any]] = {
        "flash_attn": {},
        "flash_attn.bert_padding": {
            "rearrange": rearrange,
            "index_first_axis": operator.getitem,
            "unpad_input": _unpad_input,
            "pad_input": _pad_input,
        },
        "flash_attn.utils": {},
        "flash_attn.utils.distributed": {"all_gather": _all_gather},
    }

    def exec_module(module: ModuleType) -> None:
        for name, found in functions.items():
            sys.modules[name] = stub = ModuleType(name)
            vars(stub).update(found, __path__=[])
        try:
            execute(module)
        finally:
            for name in functions:
                sys.modules.pop(name, None)

    return exec_module


def _unpad_input(x: Any, attention_mask: Any, unused_mask: Any = None) -> tuple[Any, Any, Any, int, Any]:
    """x [B, T, ...] -> (valid rows [n, ...], their indices [n], cu_seqlens [B + 1], longest length, lengths [B])."""
    import torch

    lengths = attention_mask.sum(-1, dtype=torch.int32)
    places = attention_mask.flatten().nonzero().squeeze(-1)
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return x.flatten(0, 1)[places], places, starts, int(lengths.max()), lengths


def _pad_input(x: Any, places: Any, batch: int, width: int) -> Any:
    """Invert ``_unpad_input``: x [n, ...] -> [batch, width, ...], zeros elsewhere. Differentiable."""
    out = x.new_zeros(batch * width, *x.shape[1:]).index_copy(0, places, x)
    return out.view(batch, width, *x.shape[1:])


def _all_gather(x: Any, group: Any) -> Any:
    raise NotImplementedError("ring attention needs flash-attn, which does not run on a CPU. Use --ds.ring_attn_size 1.")


# ---- Patches for OpenRLHF 0.11.2 and DeepSpeed on a CPU ------------------------------------------

#: a Ray cluster that OpenRLHF starts; the CPUs are logical too
_CLUSTER = {"num_gpus": LOGICAL_GPUS, "num_cpus": 32, "include_dashboard": False, "object_store_memory": 200_000_000}


def _nothing() -> Callable[..., Any]:
    """Return a new function each time, because torch._dynamo tells the functions of torch.cuda apart by identity."""

    def nothing(*_: Any, **__: Any) -> None: ...

    return nothing


class Cpu(str):
    """Result of ``torch.cuda.current_device()``: OpenRLHF uses it as a device or formats it into "cuda:…"."""

    def __format__(self, spec: str) -> str:
        return "0"


def _on_import(openrlhf: ModuleType, journal: Journal) -> None:
    """Make the ``torch.cuda`` calls of OpenRLHF's processes no-ops."""
    import torch

    if torch.cuda.is_available():
        return
    calls = {name: _nothing() for name in ("set_device", "synchronize", "empty_cache", "current_stream")}
    calls["current_device"] = lambda: Cpu("cpu")
    for name, call in calls.items():
        journal.set_attr(
            torch.cuda, name, call,
            target=f"torch.cuda.{name}",
            reason="OpenRLHF calls it without checking for a GPU; replaced only in processes that import openrlhf",
            remove_when="OpenRLHF calls torch.accelerator instead of torch.cuda",
        )  # fmt: skip


@replacement
def _mesh(original: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
    return original("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


@replacement
def _ds_config(original: Any, *args: Any, **kwargs: Any) -> Any:
    config = original(*args, **kwargs)
    if config.get("optimizer", {}).get("type") == "AdamW":
        config["optimizer"]["params"]["torch_adam"] = True
    for part in ("offload_optimizer", "offload_param"):
        if "pin_memory" in config["zero_optimization"].get(part, {}):
            config["zero_optimization"][part]["pin_memory"] = False
    return config


@replacement
def _moving_average(original: Any, self: Any, model: Any, model_ema: Any, beta: float = 0.992, device: str = "cpu") -> Any:
    return original(self, model, model_ema, beta, "cpu" if device == "cuda" else device)


@replacement
def _group(original: Any, master_address: str, master_port: int, rank: int, world_size: int, device: Any) -> Any:
    return registry.rollout().join(master_address, master_port, rank, world_size, "cpu")


@replacement
def _fp16(original: Any, self: Any) -> bool:
    return True


@replacement
def _update_weight(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    class CudaToCpu(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    with CudaToCpu():
        return original(self, *args, **kwargs)


@replacement
def _wait(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    handle = original(self, *args, **kwargs)
    if handle is not None and hasattr(handle, "wait"):
        handle.wait()
    return handle


@replacement
def _executor(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.distributed_executor_backend == "ray":
        self.distributed_executor_backend = "mp"
    return original(self, *args, **kwargs)


@replacement
def _ray_init(original: Any, address: str | None = None, *args: Any, **kwargs: Any) -> Any:
    own = address in (None, "local") and not os.environ.get("RAY_ADDRESS")
    if own and "openrlhf" in sys.modules:
        kwargs |= {name: value for name, value in _CLUSTER.items() if kwargs.get(name) is None}
    return original(address, *args, **kwargs)


HOOKS = (
    OnImport(
        "openrlhf", "torch.cuda", _on_import, fixes="openrlhf",
        reason="OpenRLHF calls torch.cuda without checking for a GPU, and the calls fail",
        upstream=NO_REPORT,
        remove_when="OpenRLHF calls torch.accelerator instead of torch.cuda",
        needed_by="a run on a CPU",
    ),
)

_STRATEGY = "openrlhf.utils.deepspeed.deepspeed"

FOR_OPENRLHF = (
    CpuPatch(
        _STRATEGY, "init_device_mesh", _mesh, fixes="openrlhf",
        reason="OpenRLHF requests a 'cuda' device mesh, which fails on a CPU",
        remove_when="OpenRLHF's DeepspeedStrategy passes the current device type to init_device_mesh",
    ),
    CpuPatch(
        _STRATEGY, "get_train_ds_config", _ds_config, fixes="openrlhf",
        reason="OpenRLHF picks DeepSpeed's FusedAdam, which on a CPU needs a compiler, and pinned memory, which CPUs lack",
        remove_when="OpenRLHF's get_train_ds_config, or DeepSpeed, uses torch_adam and no pin_memory without an accelerator",
    ),
    CpuPatch(
        _STRATEGY, "get_eval_ds_config", _ds_config, fixes="openrlhf",
        reason="OpenRLHF asks DeepSpeed to pin memory, which fails without an accelerator",
        remove_when="OpenRLHF's get_eval_ds_config pins memory only with an accelerator, or DeepSpeed ignores it without one",
    ),
    CpuPatch(
        _STRATEGY, "DeepspeedStrategy.moving_average", _moving_average, fixes="openrlhf",
        reason="OpenRLHF computes the EMA on 'cuda', which fails on a CPU",
        remove_when="OpenRLHF's ActorPPOTrainer passes the parameters' device to moving_average",
    ),
    *(
        CpuPatch(
            module, "stateless_init_process_group", _group, fixes="openrlhf",
            reason="OpenRLHF's weight sync group uses NCCL, which fails on a CPU; the trainer imports it by name",
            remove_when="OpenRLHF's stateless_init_process_group takes a backend, such as gloo",
        )
        for module in ("openrlhf.utils.distributed_util", "openrlhf.trainer.ray.ppo_actor")
    ),
    CpuPatch(
        "openrlhf.trainer.ray.vllm_worker_wrap", "WorkerWrap.update_weight", _update_weight, fixes="openrlhf",
        reason="OpenRLHF's vLLM worker allocates on 'cuda', which fails on a CPU",
        remove_when="OpenRLHF's WorkerWrap.update_weight allocates on the worker's device",
    ),
    CpuPatch(
        "deepspeed.accelerator.cpu_accelerator", "CPU_Accelerator.is_fp16_supported", _fp16, fixes="deepspeed",
        reason="DeepSpeed rejects FP16 on a CPU without AVX512-FP16 or AMX-FP16, although torch can compute it, slowly",
        upstream="https://github.com/deepspeedai/DeepSpeed/pull/7207",
        remove_when="DeepSpeed's CPU_Accelerator.is_fp16_supported no longer depends on oneDNN's FP16 instructions",
    ),
    *(
        CpuPatch(
            "deepspeed.comm.torch", f"TorchBackend.{name}", _wait, fixes="deepspeed",
            reason="DeepSpeed waits only for the last of several asynchronous gathers, but gloo does not finish them in order, "
            "so with two ZeRO-3 ranks it reads weights before they have arrived",
            upstream="https://github.com/deepspeedai/DeepSpeed/pull/8539",
            remove_when="the oldest supported DeepSpeed contains DeepSpeed#8539",
        )
        for name in ("all_gather", "all_gather_into_tensor")  # they gather ZeRO-3 weights, one per weight
    ),
    CpuPatch(
        "vllm.engine.arg_utils", "EngineArgs.create_engine_config", _executor, fixes="openrlhf",
        reason="OpenRLHF requests vLLM's Ray executor for tensor parallelism, which vLLM does not support on CPUs",
        remove_when="vLLM's CpuPlatform accepts distributed_executor_backend='ray', or OpenRLHF lets users choose the executor",
    ),
    CpuPatch(
        "ray", "init", _ray_init, fixes="openrlhf",
        reason="OpenRLHF's actors request GPUs, so without any Ray never places them; this adds logical GPUs. A cluster that "
        "is already running is not covered",
        remove_when="OpenRLHF's actors (ray.remote(num_gpus=1)) request CPUs when there is no GPU",
    ),
)

ENVIRONMENT = {"DS_ACCELERATOR": ("cpu", "which accelerator DeepSpeed uses")}
