"""The engine's graphs: CUDA graphs of decoding steps in exact mode, proven at load, and the names of compiled graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase

from jetrl_patch.adapters.vllm import formats
from jetrl_patch.adapters.vllm.ranks import gathered
from jetrl_patch.errors import ConflictError, explain

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from jetrl_patch.config import Config

logger = logging.getLogger(__name__)

# ---- Ask vLLM for graphs -------------------------------------------------------------------------
# A graph records the kernel launches of a decoding step, one new token per request. Grids follow from shapes, and no op reads
# anything back, so a replay runs the same kernels on the current contents of the input buffers. Prefill and mixed steps run
# eagerly.

#: capture modes that a framework sets for its users: verl sets the first, which is also vLLM's default
_DEFAULTS = (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY)


def asks_for_graphs(args: EngineArgs, config: Config) -> bool:
    """Whether an exact engine on a GPU captures graphs. ``decode_graphs="auto"`` follows the engine's own settings.

    Only graphs of the V1 model runner with one token per request are proven. With V2, or with drafts, this sets eager mode, or
    raises ConflictError for ``True``.
    """
    eager = args.enforce_eager or args.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    asked = config.decode_graphs is True or (config.may_capture and not eager)
    if envs.VLLM_USE_V2_MODEL_RUNNER:
        required, found, fix = "the V1 model runner, whose graphs are proven", "VLLM_USE_V2_MODEL_RUNNER=1", "unset it"
    elif args.speculative_config is not None:
        required, found, fix = "steps of one token per request, whose graphs are proven", "speculative_config", "remove it"
    else:
        return asked
    if not asked:
        return False
    words = explain("decode_graphs in exact mode", required=required, found=found, fix=fix)
    if config.decode_graphs is True:
        raise ConflictError(words)
    logger.warning("jetrl_patch: decoding runs eagerly, without CUDA graphs: %s", words)
    args.enforce_eager = True
    return False


def capture_decoding(args: EngineArgs, config: Config) -> None:
    """Have vLLM capture whole decoding steps in CUDA graphs and compile nothing, because a compiler changes the rounding.

    Settings that request compilation, or another way to capture, are overridden with a warning. With ``decode_graphs=True`` they
    raise ConflictError.
    """
    settings = args.compilation_config
    if settings.mode not in (None, CompilationMode.NONE):
        required = "NONE (a compiler fuses ops and changes their rounding)"
        _override(config, "mode", required, found=settings.mode.name, fix="leave it unset")
    if settings.cudagraph_mode not in (None, *_DEFAULTS):
        required, fix = "FULL_DECODE_ONLY (prefill and mixed steps run eagerly)", "leave it unset, or set decode_graphs=False"
        _override(config, "cudagraph_mode", required, found=str(settings.cudagraph_mode), fix=fix)
    if args.enforce_eager:
        logger.warning("jetrl_patch: set enforce_eager=False, because decode_graphs=True replays decoding steps from CUDA graphs")
    settings.mode, settings.cudagraph_mode = CompilationMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY
    args.enforce_eager = False


def _override(config: Config, name: str, required: str, found: str, fix: str) -> None:
    what = f"vLLM compilation_config.{name} with decode_graphs={config.decode_graphs!r}"
    if config.decode_graphs is True:
        raise ConflictError(explain(what, required=required, found=found, fix=fix))
    logger.warning("jetrl_patch: %s: set %s instead of %s", what, required, found)


# ---- Prove them at load --------------------------------------------------------------------------
# Each captured step is replayed once on new inputs: random tokens, positions, lengths, keys and values. The eager step runs on
# the same inputs. If one bit of the hidden states differs on one rank, all ranks run eagerly from then on. The head and the
# sampler are never captured.
#
# In vLLM's dummy step all requests read block 0 of the KV cache, which no request owns, and write nowhere. A gated delta net
# replaces the state of each request, so here each has one of its own, in another block (vLLM keeps states and keys in the same
# memory), and both ways run a second step from what the first left.

#: longest context of the trial, in tokens
_LONGEST = 2048


def prove_graphs(worker: Any) -> None:
    """Compare every captured step of a loaded worker with the eager one, bit for bit. A difference turns the graphs off.

    The ranks decide together, so all of them must call this.
    """
    runner: GPUModelRunner = worker.model_runner
    if worker.vllm_config.model_config.enforce_eager:
        return
    sizes = sorted(key.num_tokens for key in runner.cudagraph_dispatcher.cudagraph_keys[CUDAGraphMode.FULL])
    if not sizes:
        return
    start = time.monotonic()
    differ = _different(runner, sizes)
    for rank, found in enumerate(gathered(differ)):
        if found:
            run_eagerly(worker, f"of {len(sizes)}, those for {found} tokens differ from the eager step (rank {rank})")
            return
    words = "jetrl_patch: the CUDA graphs of %d decoding steps have the bits of the eager steps, tried in %.1f s"
    formats.logger.info(words, len(sizes), time.monotonic() - start)


def run_eagerly(worker: Any, why: str) -> None:
    """Make a loaded worker run all steps eagerly, whether or not it has captured graphs, and log why."""
    runner: GPUModelRunner = worker.model_runner
    worker.vllm_config.model_config.enforce_eager = True
    worker.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    runner.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.NONE)  # no step runs from a graph any more
    if isinstance(runner.model, CUDAGraphWrapper):
        runner.model.clear_graphs()
    formats.logger.warning("jetrl_patch: decoding runs eagerly, without CUDA graphs: %s", why)


def _different(runner: Any, sizes: list[int]) -> list[int]:
    """The sizes whose graphs compute other bits. A rank that finds one continues, because the others wait for it."""
    wrapper, vocabulary = runner.model, runner.model_config.get_vocab_size()
    context = runner.compilation_config.static_forward_context
    layers = [layer for layer in context.values() if getattr(getattr(layer, "impl", None), "jetrl_exact", False)]
    states = [state for layer in context.values() if isinstance(layer, MambaBase) for state in layer.kv_cache[:2]]
    runner.model = compared = _Compared(wrapper, vocabulary, runner.model_config.max_model_len, states)
    try:
        fill_first_block(layers)
        for size in sizes:
            runner._dummy_run(
                size,
                cudagraph_runtime_mode=CUDAGraphMode.FULL,
                uniform_decode=True,
                allow_microbatching=False,
                skip_eplb=True,
                remove_lora=False,
            )
    finally:
        runner.model = wrapper
        for layer in layers:
            layer.kv_cache[0].zero_()
        for state in states:
            state[: max(sizes) + 1].zero_()
    assert len(compared.equal) == len(sizes)
    return [size for size, equal in zip(sizes, compared.equal, strict=True) if not equal]


def fill_first_block(layers: Iterable[Any]) -> None:
    """Write random keys and values to block 0 of each layer's cache, as a step writes them.

    Random bytes would be NaN in an FP8 cache, and then so would the output of every step.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(torch.bfloat16)

    for layer in layers:
        layer.impl.fill_first_block(layer, random)


class _Compared:
    """Replaces the model in a step: runs it eagerly, then from its graph, on the same random inputs.

    ``states`` are those of gated delta nets, with the slot of a request first.
    """

    def __init__(self, wrapper: CUDAGraphWrapper, vocabulary: int, longest: int, states: list[torch.Tensor]) -> None:
        self.wrapper, self.vocabulary, self.longest = wrapper, vocabulary, min(longest, _LONGEST)
        self.states, self.equal = states, list[bool]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapper, name)

    def __call__(self, **inputs: Any) -> Any:
        eager, replayed = (self._run(step, inputs) for step in (self.wrapper.unwrap(), self.wrapper))
        self.equal.append(torch.equal(eager.view(torch.uint8), replayed.view(torch.uint8)))
        return replayed[0]

    def _run(self, step: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """The output of a step, and with states also of the same step from what it left there."""
        self._fill(**inputs)
        # copies, because each replay writes to the same place
        return torch.stack([step(**inputs).clone() for _ in range(2 if self.states else 1)])

    def _fill(self, positions: torch.Tensor, input_ids: Any = None, inputs_embeds: Any = None, **others: Any) -> None:
        """Write the same inputs on all ranks into the buffers that the graph reads."""
        steps: Any = get_forward_context().attn_metadata
        requests = positions.shape[-1]
        generator = torch.Generator("cpu").manual_seed(requests)
        lengths = torch.randint(1, self.longest + 1, (requests,), generator=generator, device="cpu")
        for step in steps.values():
            if hasattr(step, "non_spec_state_indices_tensor"):
                self._spread(step, lengths)
            else:
                step.seq_lens.copy_(lengths)
        for state in self.states:
            state[1 : requests + 1].normal_(generator=torch.Generator(state.device).manual_seed(requests))
        positions.copy_(lengths - 1)
        if input_ids is not None:
            input_ids.copy_(torch.randint(0, self.vocabulary, input_ids.shape, generator=generator, device="cpu"))
        if inputs_embeds is not None:
            inputs_embeds.copy_(torch.randn(inputs_embeds.shape, generator=generator, device="cpu"))

    def _spread(self, step: Any, lengths: torch.Tensor) -> None:
        """Give each request of a delta net's step a slot, and some no state yet. If slots are fewer, the rest have no token."""
        requests, slots = len(lengths), min(len(state) for state in self.states) - 1
        step.non_spec_state_indices_tensor.copy_(torch.arange(1, requests + 1).clamp(max=slots))
        step.non_spec_query_start_loc.copy_(torch.arange(requests + 1).clamp(max=slots))
        step.has_initial_state.copy_(lengths % 4 > 0)


# ---- Keep vLLM from serving a graph that it compiled under other settings ------------------------
# vLLM keeps compiled graphs on disk and finds them by a hash of its configuration (``VllmConfig.compute_hash``), which leaves out
# the settings of the quantization and of this plugin. The scale format, the backend and the fused ops are constants of a graph:
# without this, an engine could run a graph that was compiled with other ones.

#: our key in ``additional_config``, which vLLM hashes completely
KEY = "jetrl_patch"


def mark_settings(vllm_config: VllmConfig, config: Config, backend: str, attention: str) -> None:
    """Add every setting, and the worker's choices on its device, to what vLLM hashes.

    Call it in the worker before its first step, which compiles. Raises ConflictError if ``additional_config`` is not a dict.
    """
    given: Any = vllm_config.additional_config
    if not isinstance(given, dict):
        what, required = "vLLM additional_config with a quantized rollout", "a dict, to which jetrl_patch adds its settings"
        raise ConflictError(explain(what, required=required, found=type(given).__name__, fix="leave it unset, or pass a dict"))
    vllm_config.additional_config = {**given, KEY: {**config.to_env(), "backend": backend, "attention": attention}}
