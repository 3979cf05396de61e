"""Real vLLM engines on the double of an H100: load, trials, KV cache, graphs, generation, weight syncs from a trainer's model.

``python -m tests.cuda_double.engine LIBRARY SCHEMAS CASES`` runs each case in a process that is forked after all imports. CASES
is a JSON object, name -> [family, settings of the plugin, engine arguments]. A line of JSON is printed per case: its name, and
what was found or the error.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from itertools import chain
from pathlib import Path
from typing import Any

ctypes.CDLL(sys.argv[1])  # first, because torch keeps what it was told about devices
os.environ |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}

from tests.cuda_double import graphs, libraries  # noqa: E402
from tests.cuda_wheels.h100_double import stand_in  # noqa: E402

stand_in(Path(sys.argv[2]))
graphs.install()  # vLLM's modules keep some of the functions
libraries.record_python()

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from vllm import LLM  # noqa: E402
from vllm.v1.worker import gpu_worker  # noqa: E402

import jetrl_patch  # noqa: E402
from jetrl_patch.adapters.vllm.sample import generate  # noqa: E402
from jetrl_patch.fp8.convert import per_expert  # noqa: E402
from jetrl_patch.sync import delta  # noqa: E402
from jetrl_patch.sync.protocol import ALIGNMENT  # noqa: E402
from jetrl_patch.sync.send import SyncStats  # noqa: E402
from jetrl_patch.trainer.source import Source, convert  # noqa: E402
from tests.cuda_double import engine_device, values  # noqa: E402
from tests.cuda_double.checks import launches, need  # noqa: E402
from tests.cuda_wheels.resolve import ARCHITECTURES, SIZES  # noqa: E402
from tests.models import config_of  # noqa: E402

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


def trainer(family: str, settings: Any) -> tuple[Any, Source]:
    """A model of the trainer on the device, converted, and where its syncs come from."""
    with torch.device("cuda", 0):
        model = AutoModelForCausalLM.from_config(config_of(family, dtype="bfloat16", **SIZES[family]), dtype=torch.bfloat16)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return model, convert(model, settings, shapes, rollout_tp=1, device_type="cuda")


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


def run(family: str, plugin: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """Everything that an engine does in training, once. Returns what the tests compare."""
    # FlashInfer is not installed, and exact mode turns it off itself. The V2 runner reads how many tokens it sampled: here, zero
    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    jetrl_patch.enable(**plugin)
    with tempfile.TemporaryDirectory() as root, values.tensors():
        llm = build(root, family, engine)
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        no_waits(worker.model_runner.get_model())
        report = worker.jetrl_report()
        found = {key: report[key] for key in ("backend", "attention")}
        found |= {"runner": type(worker.model_runner).__module__, "graphs": graphs.Graph.captured, "load": dict(launches)}
        found["eager"] = worker.vllm_config.model_config.enforce_eager
        model, source = trainer(family, jetrl_patch.status().config)
        before, steps = addresses(worker), []
        syncs = 2 if source.base is not None else 1
        for turn in range(syncs + 1):
            launches.clear()
            graphs.Graph.replays = 0
            samples = generate(llm, list(PROMPTS), LENGTH, 0.7)
            need(all(len(sample.response) == LENGTH for sample in samples), "responses", samples)
            steps.append({"launches": dict(launches), "replays": graphs.Graph.replays})
            if turn < syncs:  # verl's order on GPUs that trainer and engine share
                llm.sleep(level=2)
                llm.wake_up(tags=["weights"])
                found["synced"] = sync(worker, model, source)
                llm.wake_up(tags=["kv_cache"])
        need(addresses(worker) == before, "a weight sync moved parameters")
    return found | {"steps": steps}


def main(cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
    engine_device.install_engine()
    delta.apply = check_changes
    gpu_worker.kernel_warmup = lambda worker: None  # of kernels that no case uses
    gc.collect()
    gc.freeze()  # vLLM collects often
    for name, case in cases.items():
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            try:
                found = run(*case)
            except BaseException as error:  # reported: the child must not go on with the other cases
                traceback.print_exc()
                found = {"error": type(error).__name__, "text": str(error), "trace": traceback.format_exc()[-6000:]}
            print(json.dumps({"name": name, "seconds": round(time.process_time(), 1)} | found), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(json.loads(sys.argv[3]))
