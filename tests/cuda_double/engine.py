"""Real vLLM engines on the double of an H100: load, trials, KV cache, graphs, generation, weight syncs from a trainer's model.

``python -m tests.cuda_double.engine LIBRARY SCHEMAS CASES`` runs each case in a process that is forked after all imports, or in
one for each rank. CASES is a JSON object of ``compiled.Cases``. A line of JSON is printed per case: its name, and what was found
or the error.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from itertools import chain
from pathlib import Path
from typing import Any

ctypes.CDLL(sys.argv[1])  # first, because torch keeps what it was told about devices
os.environ |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}

from tests.cuda_double import graphs, libraries, traced  # noqa: E402
from tests.cuda_wheels.h100_double import stand_in  # noqa: E402

stand_in(Path(sys.argv[2]))
graphs.install()  # vLLM's modules keep some of the functions
libraries.record_python()

import torch  # noqa: E402

torch.compile = traced.without_inductor(torch.compile)  # type: ignore[assignment]

from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from vllm import LLM  # noqa: E402
from vllm.v1.worker import gpu_worker  # noqa: E402
from vllm.v1.worker.gpu import async_utils  # noqa: E402

import jetrl_patch  # noqa: E402
from jetrl_patch.adapters.vllm import graphs as proof  # noqa: E402
from jetrl_patch.adapters.vllm import ranks as sums  # noqa: E402
from jetrl_patch.adapters.vllm.formats import BLOCKS  # noqa: E402
from jetrl_patch.adapters.vllm.method import quantized_modules  # noqa: E402
from jetrl_patch.adapters.vllm.sample import generate  # noqa: E402
from jetrl_patch.fp8.convert import per_expert  # noqa: E402
from jetrl_patch.sync import delta  # noqa: E402
from jetrl_patch.sync.protocol import ALIGNMENT  # noqa: E402
from jetrl_patch.sync.send import SyncStats  # noqa: E402
from jetrl_patch.trainer.source import Source, convert  # noqa: E402
from tests.cuda_double import device, engine_device, peers, values  # noqa: E402
from tests.cuda_double.checks import launches, need  # noqa: E402
from tests.cuda_double.compiled import Cases  # noqa: E402
from tests.cuda_wheels.resolve import ARCHITECTURES, SIZES  # noqa: E402
from tests.models import config_of  # noqa: E402
from tests.ray.cluster import free_port  # noqa: E402

#: tokens of the prompts, and how many follow each
PROMPTS, LENGTH = ([3] * 40, [4] * 7, [5]), 4
#: tensors of a message
BUCKET = 5


def build(root: str, family: str, engine: dict[str, Any]) -> Any:
    """Start an engine from a checkpoint in ``root``. It loads, is tried, and captures its graphs."""
    config = config_of(family, architectures=[ARCHITECTURES[family]], dtype="bfloat16", **SIZES[family])
    config.save_pretrained(root)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    stored = dict(chain.from_iterable(per_expert(name, t) for name, t in model.state_dict().items()))
    save_file({name: t.contiguous() for name, t in stored.items()}, f"{root}/model.safetensors", {"format": "pt"})
    settings = {
        "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 64,
        "logprobs_mode": "processed_logprobs", "skip_tokenizer_init": True, "enable_sleep_mode": True,
    }  # fmt: skip
    return LLM(model=root, **(settings | engine))


def no_waits(model: torch.nn.Module) -> None:
    """From now on the host must not wait for the device in the model's forward pass."""

    def change(by: int) -> Any:
        def hook(*_: Any) -> None:
            graphs.State.busy += by

        return hook

    model.register_forward_pre_hook(change(1))
    model.register_forward_hook(change(-1), always_call=True)


def trainer(family: str, settings: Any, ranks: int, by_experts: bool) -> tuple[Any, Source]:
    """A model of the trainer on the device, converted, and where its syncs come from."""
    with device.DEVICE:
        model = AutoModelForCausalLM.from_config(config_of(family, dtype="bfloat16", **SIZES[family]), dtype=torch.bfloat16)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return model, convert(model, settings, shapes, rollout_tp=ranks, rollout_ep=ranks if by_experts else 1, device_type="cuda")


def sync(worker: Any, model: Any, source: Source) -> dict[str, int]:
    """One weight sync. A second one sends only the changes, with ``sync="delta"``."""
    receiver = worker.jetrl_receiver
    if source.base is not None:
        source.base.offer(receiver.held())
    messages = list(source.stream(model.named_parameters(), SyncStats()))
    for start in range(0, len(messages), BUCKET):
        receiver.on_bucket(messages[start : start + BUCKET])
    found: dict[str, int] = receiver.finish()
    return found


def check_changes(base: torch.Tensor, packed: torch.Tensor) -> None:
    """In place of ``delta.apply``, for whose records there are no values."""
    need(packed.is_cuda and packed.dtype == torch.uint8 and packed.dim() == 1 and packed.numel() % ALIGNMENT == 0, "a record")
    need(not base.is_cuda and base.is_contiguous(), "a base on the device")


def addresses(worker: Any) -> dict[str, int]:
    model = worker.model_runner.get_model()
    return {name: t.data_ptr() for held in (model.named_parameters(), model.named_buffers()) for name, t in held}


def one_token(init: Any) -> Any:
    """``AsyncOutput.__init__`` of the V2 runner, which copies from the device how many tokens it sampled for each request."""

    def output(self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        self.num_sampled_tokens_np = self.num_sampled_tokens_np + 1

    return output


def on_purpose(what: str, rank: int) -> None:
    """Make something happen that all ranks must follow, though one alone sees it."""
    if "V2" in what:
        async_utils.AsyncOutput.__init__ = one_token(async_utils.AsyncOutput.__init__)
    if "compiled" in what:
        traced.install()
    elif what == "slices":
        sums.SAVED = 1
    elif "differs" in what and rank:
        module, name, differs = {
            "a sum differs": (sums, "_difference", lambda *_: "4 values"),
            "a graph differs": (proof, "_different", lambda _, sizes: sizes),
        }[what]
        original = getattr(module, name)
        setattr(module, name, lambda *args: (original(*args), differs(*args))[1])


def run(family: str, plugin: dict[str, Any], engine: dict[str, Any], purpose: str) -> dict[str, Any]:
    """Everything that an engine does in training, once. Returns what the tests compare."""
    # FlashInfer is not installed, and exact mode turns it off itself
    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_V2_MODEL_RUNNER": str(int("V2" in purpose))}
    ranks = engine.get("tensor_parallel_size", 1)
    on_purpose(purpose, int(os.environ.get("RANK", 0)))
    if ranks > 1:
        device.DEVICE = torch.device("cuda", int(os.environ["RANK"]))
        engine = {**engine, "distributed_executor_backend": "external_launcher"}
        peers.install()
    jetrl_patch.enable(**plugin)
    with tempfile.TemporaryDirectory() as root, values.tensors():
        if "compiled" in purpose:
            os.environ["TORCHDYNAMO_DISABLE"] = "0"  # the adapter for CPUs, which are here too, has set it again
            engine = {**engine, "compilation_config": {**engine["compilation_config"], "cache_dir": f"{root}/compiled"}}
        llm = build(root, family, engine)
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        no_waits(worker.model_runner.get_model())
        report = worker.jetrl_report()
        found = {key: report[key] for key in ("backend", "attention")}
        found |= {"runner": type(worker.model_runner).__module__, "graphs": graphs.Graph.captured, "load": dict(launches)}
        if found["graphs"]:
            traced.check_reads(quantized_modules(worker.model_runner.get_model()), BLOCKS)
        found["eager"] = worker.vllm_config.model_config.enforce_eager
        model, source = trainer(family, jetrl_patch.status().config, ranks, "enable_expert_parallel" in engine)
        before, steps = addresses(worker), []
        syncs = 2 if source.base is not None else 1
        sleeps = "V2" not in purpose  # whose states of requests are in the weights' pool; kernels write them for each request
        for turn in range(syncs + 1):
            launches.clear()
            graphs.Graph.replays = 0
            samples = generate(llm, list(PROMPTS), LENGTH, 0.7)
            need(all(len(sample.response) == LENGTH for sample in samples), "responses", samples)
            steps.append({"launches": dict(launches), "replays": graphs.Graph.replays})
            if turn < syncs:
                if sleeps:  # in verl's order on GPUs that trainer and engine share
                    llm.sleep(level=2)
                    need(refuses_digests(worker), "digests of an engine that sleeps")
                    llm.wake_up(tags=["weights"])
                found["synced"] = sync(worker, model, source)
                if sleeps:
                    llm.wake_up(tags=["kv_cache"])
        need(addresses(worker) == before, "a weight sync moved parameters")
        found["steps"] = steps
        if ranks > 1:
            peers.compare()
            need(all(other == found for other in peers.everybody(found)), "the ranks differ")
    return found


def refuses_digests(worker: Any) -> bool:
    try:
        return not worker.jetrl_report()
    except jetrl_patch.SyncError:
        return True


def main(cases: Cases) -> None:
    engine_device.install_engine()
    delta.apply = check_changes
    gpu_worker.kernel_warmup = lambda worker: None  # of kernels that no case uses
    gc.collect()
    gc.freeze()  # vLLM collects often
    for name, case in cases.items():
        ranks = case[2].get("tensor_parallel_size", 1)
        port = free_port() if ranks > 1 else 0
        running = {fork(name, case, {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}) for rank in range(ranks)}
        while running:
            pid, status = os.wait()
            running.remove(pid)
            if status:  # the others would wait for it
                for other in running:
                    os.kill(other, signal.SIGKILL)


def fork(name: str, case: Any, rank: dict[str, int]) -> int:
    """Run one rank of a case in a process of its own. The first rank, or one that fails, prints what it found."""
    sys.stdout.flush()
    if (child := os.fork()) > 0:
        return child
    found: dict[str, Any]
    signal.alarm(600)  # a rank may wait forever for another one
    if rank["WORLD_SIZE"] > 1:
        os.environ |= {key: str(value) for key, value in (rank | {"LOCAL_RANK": rank["RANK"]}).items()}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    try:
        found = run(*case)
    except BaseException as error:  # reported: the child must not go on with the other cases
        traceback.print_exc()
        found = {"error": type(error).__name__, "text": str(error), "trace": traceback.format_exc()[-6000:]}
    if rank["RANK"] == 0 or "error" in found:
        print(json.dumps({"name": name, "seconds": round(time.process_time(), 1)} | found), flush=True)
    os._exit("error" in found)


if __name__ == "__main__":
    main(json.loads(sys.argv[3]))
