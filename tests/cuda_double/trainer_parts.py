"""What a trainer does on a GPU besides the plain step, in exact FP8 on the double of an H100.

``python -m tests.cuda_double.trainer_parts LIBRARY PART ...`` prints, for each part, what it launched and how often it waited.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import json
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

ctypes.CDLL(sys.argv[1])  # first, because torch keeps what it was told about devices

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import jetrl_patch  # noqa: E402
from jetrl_patch.adapters.verl import logprob, transport  # noqa: E402
from jetrl_patch.backends import get_backend, row_equality  # noqa: E402
from jetrl_patch.config import Config  # noqa: E402
from jetrl_patch.exact import logprob as chunks  # noqa: E402
from jetrl_patch.exact import ops, sequences, trial  # noqa: E402
from jetrl_patch.fp8 import convert, grouped, lora, unchanged  # noqa: E402
from jetrl_patch.fp8.to_bf16 import to_bf16  # noqa: E402
from jetrl_patch.sync import send  # noqa: E402
from jetrl_patch.trainer import prepare, source  # noqa: E402
from tests import models, vision_models  # noqa: E402
from tests.cuda_double import device  # noqa: E402
from tests.cuda_double.checks import launches  # noqa: E402

TOKENS = 333


def config_of(**settings: Any) -> Config:
    return Config(**{"precision": "fp8-unified", "backend": "deep_gemm", "exact_attention": "flash3", **settings}).resolved()


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device.DEVICE, requires_grad=grad)


def built(family: str, make: Callable[[str], Any] = models.build) -> Any:
    """A model of the test suite, on the host and with values."""
    with device.unset_fake_temporarily():
        model = make(family).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def forward(model: Any, rows: int = 1) -> Tensor:
    """Log-probs of one packed row of tokens, under autocast."""
    ids, positions = (empty(rows, TOKENS, dtype=torch.int64) for _ in range(2))
    sequences.mark(positions, 7)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(input_ids=ids, position_ids=positions, use_cache=False, attention_mask=None).logits[0]
        return ops.token_log_probs(logits, ids[0], empty(TOKENS, 1, dtype=torch.float32), reuse=True)


def prepared(family: str, config: Config, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A converted model on the device. Its tables are there too: a first step, which may wait for their copy, has run."""
    model = built(family)
    assert prepare.prepare_model(model, config, device_type="cuda")
    device.to_device(model, dtype)
    if dtype == torch.bfloat16:
        forward(model).sum().backward()
    return model


def backward(model: Any) -> None:
    with device.NoWait():
        forward(model).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None or not p.requires_grad, f"{name} has no gradient"


# ---- Variants of a step -----------------------------------------------------------------------------

def fp8_cache() -> None:
    """Keys and values as in the rollout's FP8 cache, straight through in backward, and logits in FP32."""
    backward(prepared("qwen3", config_of(kv_cache="fp8", exact_attention="triton", head_dtype="float32")))


def auto() -> None:
    """Without DeepGEMM and FlashAttention-3, "auto" takes this project's kernels. One layer stays in BF16, one moves there."""
    del sys.modules["deep_gemm"]
    sys.modules["vllm.vllm_flash_attn"] = None  # type: ignore[assignment]
    model = prepared("qwen3", config_of(backend="auto", exact_attention="auto", exclude=("layers.1.self_attn.o_proj",)))
    assert model.model.layers[0].mlp.up_proj.fp8.backend_name == "triton"
    to_bf16({"down": model.model.layers[0].mlp.down_proj}, exact=True)
    backward(model)


def linear() -> None:
    """Jet-RL's scope: shared FP8 linears and Hugging Face's other ops, with biases and scales in FP32."""
    backward(prepared("qwen2", config_of(align="linear", scale_format="fp32")))


def adapters() -> None:
    """LoRA by merged weights, and the merged tensors of a sync."""
    import peft

    config = config_of()
    model = built("qwen3")
    assert prepare.prepare_model(model, config, device_type="cuda")
    with device.unset_fake_temporarily():
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "k_proj", "down_proj"]))
    scaling = lora.adopt(model, merge=True)
    assert len(scaling) == 9
    device.to_device(model)
    forward(model).sum().backward()
    launches.clear()
    backward(model)
    held = dict(model.state_dict())
    with device.NoWait():
        merged = dict(lora.merged_tensors(held, {lora.plain_name(n): n for n in held}, scaling, contextlib.nullcontext))
    assert all(t.is_cuda for t in merged.values())


# ---- FSDP2 with FP32 masters, accumulation and an optimizer -----------------------------------------

def sharded(gathered: bool) -> None:
    """Two steps of two micro-batches. The first waits for tables."""
    warnings.filterwarnings("error", message=".*returned a view tensor")
    with device.unset_fake_temporarily():
        if not dist.is_initialized():
            dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        mesh = init_device_mesh("cuda", (2,))
    config = config_of()
    model = built("qwen3")
    names = prepare.prepare_model(model, config, device_type="cuda")
    device.to_device(model, torch.float32)
    if gathered:
        assert convert.gather_in_fp8(model, names, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.model.layers, model.model.embed_tokens, model.lm_head, model):  # as verl shards
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=gathered)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)  # AdamW counts its steps in tensors with values
    unchanged._read = device.waiting(unchanged._compared.clear)  # the design's wait: once for each optimizer step
    for first in (True, False):
        if not first:
            launches.clear()
        with contextlib.nullcontext() if gathered else unchanged.unchanged_weights(model):
            for _ in range(2):
                with contextlib.nullcontext() if first else device.NoWait():
                    forward(model).sum().backward()
        with device.NoWait():
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert all(p.dtype == torch.float32 for p in model.parameters())


# ---- The weight sync's sender, the monitor, log-probs in chunks -----------------------------------------

def synced() -> None:
    """A monitored step and its sync through verl's buckets: of a dense model with the precision guard, and of a mixture."""
    for family, settings in {"qwen3": {"guard_sqnr": 20.0}, "deepseek_v3": {"exact_attention": "triton"}}.items():
        config = config_of(monitor_every=1, **settings)
        model = built(family)
        shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        sender = source.convert(model, config, shapes, rollout_tp=1, device_type="cuda")
        device.to_device(model)
        forward(model).sum().backward()
        _sync(model, sender)  # sync 0 sets the hooks
        backward(model)
        launches.clear()
        for module, leaf in sender.buffers.values():  # as verl offloads FSDP2's, in a copy that may not have ended
            setattr(module, leaf, getattr(module, leaf).to("cpu", non_blocking=True))
        _sync(model, sender)


def _sender() -> Any:
    """verl's own buckets."""
    verl_sender = transport.watched_sender(transport.Peer(None, 60.0), zmq_handle="", bucket_size_mb=1)
    verl_sender._init_socket = lambda: setattr(verl_sender, "socket", _Socket())
    return verl_sender


def _sync(model: Any, sender: source.Source) -> None:
    """The statistics and the guard wait, once each sync, and so do OpenRLHF's buckets for the manifest and the digests."""
    verl, stats = _sender(), send.SyncStats()
    sender.begin_sync(lambda: model.state_dict().items())
    with device.NoWait():
        stream = sender.stream(model.state_dict().items(), stats)
        asyncio.run(verl.async_send_weights(transport.ending_early(stream, verl)))
    again = sender.stream(model.state_dict().items(), send.SyncStats())
    buckets = list(send.pack(again, device.DEVICE, 1 << 20))
    assert len(buckets) > 1 and all(bucket.flat.is_cuda for bucket in buckets)
    sender.end_sync()
    assert stats.layers == len(sender.layers) and stats.tensors == len(stats.digests)


class _Socket:
    """A worker that takes every bucket."""

    announced = None

    def send_pyobj(self, obj: Any) -> None:
        pass

    def recv(self) -> bytes:
        return b""

    def close(self) -> None:
        pass


def scored() -> None:
    """verl's fused log-probs and entropies from hidden states, in several chunks and blocks, of a head in BF16 and in FP32."""
    chunks.LOGIT_BYTES = 1 << 20
    hidden, labels = empty(1500, 256, grad=True), empty(1500, dtype=torch.int64)
    outside = logprob.banned_columns(empty(1, 384), 300, [5])  # waits once for each vocabulary
    for head in ("bfloat16", "float32"):
        weight = empty(384, 256, grad=True)
        product = logprob.product_of(config_of(head_dtype=head))
        for wanted in ((0,), (0, 1)):
            with device.NoWait():
                logits_of = lambda h, w, product=product: logprob.ban(product(h, w), outside)  # noqa: E731
                made = chunks.chunked_log_probs(hidden, weight, labels, logits_of, 0.7)
                sum(made[at].sum() for at in wanted).backward()
            assert hidden.grad is not None and weight.grad.dtype == torch.bfloat16
    logits, temperatures = empty(1500, 384, grad=True), empty(1500, 1, dtype=torch.float32)
    with device.NoWait():  # one temperature for each row, banned tokens
        ops.token_log_probs(logits, labels, temperatures, edit=lambda x, _: logprob.ban(x, outside)).sum().backward()


# ---- Trials, and the vision tower -----------------------------------------------------------------------

def trials() -> None:
    """The trials of linear layers and of experts, as an engine makes them. They may wait."""
    repeated = device.on_host(torch.repeat_interleave)
    torch.repeat_interleave = lambda counts: torch.empty_like(repeated(counts))
    torch.Tensor.nonzero = lambda self: empty(5, self.dim(), dtype=torch.int64)  # type: ignore[method-assign]
    first, second = (row_equality.Part(256, 0, 256, at) for at in (0, 256))
    fused, ranks = row_equality.Layout((first, second)), row_equality.Layout((first,), ranks=2)
    layouts = {(576, 256): None, (512, 256): fused, (256, 128): ranks}
    for name in ("deep_gemm", "triton", "cublaslt"):
        for shape, layout in layouts.items():
            row_equality.require_row_equality(get_backend(name), shape, device.DEVICE, "pow2", layout)
        assert grouped.require_expert_equality(get_backend(name), 8, 3, (256, 128), device.DEVICE)
    trial.require_exact_tower(128, 2, device.DEVICE)
    trial.require_exact_ops(trial.Sizes(256, 512, 4, 2, 64, 384), device.DEVICE, 16, fp8_cache=True)


def seen() -> None:
    """The blocks and the merger of Qwen3-VL's vision tower. Its attention reads the ends of images: the host knows them."""
    model = built("qwen3_vl", vision_models.build)
    assert prepare.prepare_model(model, config_of(exact_attention="triton"), device_type="cuda")
    device.to_device(model)
    visual, patches = model.model.visual, 96
    x, angles = empty(patches, 128, grad=True), (empty(patches, 64), empty(patches, 64))
    ends = torch.tensor([0, 32, 96], dtype=torch.int32, device=device.DEVICE)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for block in visual.blocks:
            x = block(x, cu_seqlens=ends, position_embeddings=angles)
        visual.merger(x).sum().backward()
    assert all(p.grad is not None for p in visual.blocks.parameters())


PARTS: dict[str, Callable[[], None]] = {
    "fp8 cache": fp8_cache, "auto": auto, "linear": linear, "adapters": adapters, "sharded": lambda: sharded(False),
    "gathered": lambda: sharded(True), "synced": synced, "scored": scored, "trials": trials, "seen": seen,
}  # fmt: skip


def import_verl() -> None:
    """verl's buckets without the rest of their package, which imports vLLM."""
    import verl.workers.rollout

    name = "verl.workers.rollout.vllm_rollout"
    sys.modules[name] = package = ModuleType(name)
    package.__path__ = [f"{verl.workers.rollout.__path__[0]}/vllm_rollout"]
    buckets = importlib.import_module(f"{name}.bucketed_weight_transfer")
    buckets.reduce_tensor, buckets.get_device_name, buckets.get_device_id = lambda tensor: "handle", lambda: "cuda", lambda: 0


def main(names: list[str]) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    import_verl()
    device.install(True)
    found = {}
    for name in names:
        launches.clear()
        with device.tensors_without_values():
            PARTS[name]()
        found[name] = dict(launches)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[2:])
