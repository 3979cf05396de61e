"""The rollout of the campaign: a real vLLM engine in a Ray actor, with a framework's own worker extension."""

from __future__ import annotations

import os
from typing import Any

from tests.vllm.test_weights import in_engine, worker_of

#: framework -> the class that it mixes into vLLM's worker
EXTENSIONS = {
    "verl": "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension",
    "openrlhf": "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
}
PROMPTS = [[5, 17, 33, 64], [9, 8, 7]]


def start(framework: str, model: str, environ: dict[str, str]) -> Any:
    """Start a rollout in a Ray actor with these variables. Returns its handle at once."""
    import ray

    variables = {**environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": os.getcwd()}
    return ray.remote(Rollout).options(runtime_env={"env_vars": variables}, num_cpus=1).remote(framework, model)


class Rollout:
    """What the senders call. Every method answers after the engine has."""

    def __init__(self, framework: str, model: str) -> None:
        import jetrl_patch
        from jetrl_patch.adapters.vllm.sample import build_engine
        from jetrl_patch.measure.parity import Job

        config = jetrl_patch.status().config
        assert config is not None, "the environment's JETRL_* variables did not reach this process"
        arguments = (("worker_extension_cls", EXTENSIONS[framework]), ("kv_cache_memory_bytes", 64 << 20))
        self.llm = build_engine(Job(model=model, config=config, engine=arguments), 160)

    def pid(self) -> int:
        return os.getpid()

    def call(self, method: str, **kwargs: Any) -> Any:
        """As verl calls a worker."""
        return self.llm.collective_rpc(method, kwargs=kwargs)[0]

    def update_weight(self, *args: Any) -> Any:
        """As OpenRLHF calls a worker."""
        return self.llm.collective_rpc("update_weight", args=args)

    def update_weight_cuda_ipc(self, *args: Any) -> Any:
        return self.llm.collective_rpc("update_weight_cuda_ipc", args=args)

    def reset_prefix_cache(self) -> None:
        self.llm.reset_prefix_cache()

    def clear_kv_cache(self) -> None:
        self.llm.reset_prefix_cache()

    def set_global_steps(self, step: int) -> None:
        pass

    def generate(self) -> list[list[tuple[int, float]]]:
        """Tokens of two responses and their log-probs. Raises SyncError if the engine refuses to generate."""
        from vllm import SamplingParams

        # the worker's check before each forward; an error there would end vLLM's engine, which must survive here
        worker_of(self.llm).jetrl_receiver.check_serving()
        drawn = SamplingParams(temperature=1.0, seed=7, max_tokens=8, logprobs=0, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], drawn, use_tqdm=False)
        made = [output.outputs[0] for output in outputs]
        return [[(t, row[t].logprob) for t, row in zip(one.token_ids, one.logprobs, strict=True)] for one in made]

    def memory(self) -> dict[str, int]:
        """Digest of every parameter in this rank's memory."""
        from jetrl_patch.sync.digest import digest

        return {name: digest(tensor) for name, tensor in worker_of(self.llm).model_runner.get_model().named_parameters()}

    def quantized(self) -> dict[str, int]:
        """Digests of quantized weights and scales under the trainer's names."""
        return in_engine(self.llm)

    def break_loader(self, how: str, call: int) -> None:
        """Have the engine's loader fail at its n-th call from now: raise, drop the tensors, or flip a bit."""
        import torch

        installer = worker_of(self.llm).jetrl_receiver.installer
        load, left = type(installer).load, [call]

        def broken(weights: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                del installer.load
                if how == "raises":
                    raise MemoryError("injected: no memory to load a weight")
                if how == "drops tensors":
                    return
                weights = [(name, tensor.clone()) for name, tensor in weights]
                dtype = torch.bfloat16 if "BF16" in how else torch.float8_e4m3fn
                first = next(tensor for _, tensor in weights if tensor.dtype is dtype)
                first.view(-1).view(torch.uint8)[0] ^= 1
            load(installer, weights)

        installer.load = broken

    def mend_loader(self) -> None:
        vars(worker_of(self.llm).jetrl_receiver.installer).pop("load", None)
