"""Speculative decoding in exact mode: n-grams of the context as drafts, so that no weights are added to those of a sync.

An exact op gives a token the same bits whether it is decoded alone or verified beside drafts. So the log-probs of accepted
tokens, of one that replaces a rejected draft and of the one behind the last draft are those of decoding token by token, once the
last is not rounded twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jetrl_patch.adapters.vllm.arguments import DRAFTS_REQUIRED, drafts_problem
from jetrl_patch.adapters.vllm.compat import LAUNCHERS, drafts_error
from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.patching.patch import NO_REPORT, Patch, replacement
from jetrl_patch.trainer import support

if TYPE_CHECKING:
    from torch import Tensor

# ---- In every exact engine -----------------------------------------------------------------------

def check_drafts(speculative_config: Any, on_cpu: bool) -> None:
    """Raise ConfigError unless the setting asks for nothing but n-grams, VersionError if this vLLM cannot verify any here."""
    if speculative_config is None:
        return
    what = "vLLM's speculative_config with align='exact'"
    if drafts_problem(speculative_config):
        raise ConfigError(explain(what, required=DRAFTS_REQUIRED, found=str(speculative_config), fix="remove it"))
    if on_cpu and (error := drafts_error(what)) is not None:
        raise error


@replacement
def sampler_forward(original: Any, self: Any, *args: Any, logprobs_mode_override: Any = None, **kwargs: Any) -> Any:
    """Wrap V1's ``Sampler.forward``: let all of it follow the override by which the rejection sampler asks for logits."""
    if logprobs_mode_override is None:
        return original(self, *args, **kwargs)
    usual = self.logprobs_mode
    self.logprobs_mode = self.topk_topp_sampler.logprobs_mode = logprobs_mode_override
    try:
        return original(self, *args, logprobs_mode_override=logprobs_mode_override, **kwargs)
    finally:
        self.logprobs_mode = self.topk_topp_sampler.logprobs_mode = usual


@replacement
def validate_spec_decode(original: Any, self: Any, speculative_config: Any) -> None:
    """Wrap ``SamplingParams._validate_spec_decode``: refuse what leaves out tokens.

    vLLM returns the tokens that a token was drawn from for at most one token of a request per step.
    """
    original(self, speculative_config)
    if speculative_config is not None and (found := support.limits(lambda name: getattr(self, name))):
        what, required = " and ".join(found) + " with speculative decoding in exact mode", "a request that may draw all tokens"
        values = ", ".join(f"{name}={value!r}" for name, value in found.items())
        raise ConfigError(explain(what, required=required, found=values, fix=f"{support.ALL}, or drop speculative_config"))


PATCHES: tuple[Patch, ...] = (
    Patch(
        "vllm.v1.sample.sampler", "Sampler.forward", sampler_forward,
        when=lambda config: config.exact,
        reason="for the token behind the last draft vLLM takes the log-softmax of log-probs, which rounds them twice",
        upstream=NO_REPORT,
        remove_when="vLLM's Sampler.forward passes logprobs_mode_override on to Sampler.sample and TopKTopPSampler",
    ),
    Patch(
        "vllm.sampling_params", "SamplingParams._validate_spec_decode", validate_spec_decode,
        when=lambda config: config.exact,
        reason="with speculative decoding vLLM does not return which tokens top_k, top_p and bans left, which the trainer needs",
        remove_when="vLLM's SamplingMaskLists.slice_request returns the tokens of several positions",
    ),
)  # fmt: skip


# ---- On a CPU ------------------------------------------------------------------------------------
# vLLM's build for CPUs replaces the Triton kernels of its rejection sampler by functions, but in 0.30 not where the
# sampler looks for them. One of the functions also expands temperatures as integers, into a copy.

def _expand(output: Tensor, input: Tensor, cu_num_tokens: Tensor, replace_from: float, replace_to: float, **_: Any) -> None:
    """Write the value [n] of each request to each of its tokens [T], one value replaced by another."""
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    output.copy_(torch.where(input == replace_from, replace_to, input).repeat_interleave(counts))


class _Kernel:
    """A function that is launched as a Triton kernel, with the kernel's names of its arguments."""

    def __init__(self, kernel: Callable[..., None], function: Callable[..., None]) -> None:
        self.arg_names = tuple(inspect.signature(kernel).parameters)
        self._function = function

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda **given: self._function(**{name.removesuffix("_ptr"): value for name, value in given.items()})


def _on_cpu(launcher: str) -> Callable[[Any], Any]:
    """Return what makes a launcher's kernel of a function, unless vLLM has Triton."""

    def make(kernel: Any) -> Any:
        from vllm.triton_utils import HAS_TRITON
        from vllm.utils import cpu_triton_utils

        if HAS_TRITON:
            return kernel
        return _Kernel(kernel, _expand if launcher == "_expand" else getattr(cpu_triton_utils, f"{launcher}_kernel_impl"))

    return make


ON_CPU: tuple[Patch, ...] = tuple(
    Patch(
        "vllm.v1.sample.rejection_sampler", f"{launcher}.kernel", _on_cpu(launcher),
        fixes="vllm",
        reason="speculative decoding fails in vLLM's build for CPUs, which replaces kernels where nothing looks for them",
        upstream=NO_REPORT,
        remove_when="vLLM's CPUModelRunner._postprocess_triton sets the kernels of rejection_sampler's launchers",
        needed_by="speculative decoding on a CPU",
    )
    for launcher in LAUNCHERS
)  # fmt: skip
