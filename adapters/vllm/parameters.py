"""What each of vLLM's sampling parameters does to the log-prob of a sampled token, in one table.

Frameworks pass such parameters to vLLM unread. In exact mode only those are accepted that the trainer follows or that change no
log-prob; all others are refused, those of a later vLLM among them. Importing this file does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, explain
from jetrl_patch.trainer.support import BANS

#: a framework's own settings of these names say what the trainer follows, and how many numbers the framework expects
OWN = "temperature top_p top_k min_p n logprobs"

#: reason -> parameters that change no log-prob
FREE: dict[str, str] = {
    "when a response ends": "max_tokens stop stop_token_ids ignore_eos repetition_detection",
    "which token is drawn, from the same distribution": "seed",
    "what is returned, and how": (
        "prompt_logprobs prompt_logprob_start prompt_logprob_token_ids logprob_token_ids flat_logprobs detokenize "
        "skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_text_buffer_length output_kind "
        "stream_interval skip_clone routed_experts_prompt_start"
    ),
    "what is computed again: an exact op gives it the same bits": "skip_reading_prefix_cache",
}

#: reason -> parameters that change log-probs in a way that the trainer does not follow
EDITS: dict[str, str] = {
    "adds to logits, by what was generated before": "repetition_penalty presence_penalty frequency_penalty",
    "adds to the logits of some tokens": "logit_bias",
    "makes the model end its thoughts": "thinking_token_budget",
    "draws with another sampler": "watermarking",
    "replaces what was drawn": "trace_decode_token_ids",
    "is read by extensions of vLLM": "extra_args",
}


def parameter_problems(given: Mapping[str, Any], config: Config, name: Callable[[str], str]) -> Iterator[JetrlError]:
    """Yield an error for each sampling parameter of a user that exact mode does not follow.

    ``given`` holds those that a framework passes to vLLM past its own settings, ``name`` returns the user's name of one. The
    framework brings what the engine records of those that ban tokens (``trainer.support``).
    """
    if not config.exact:
        return
    followed = {parameter for names in FREE.values() for parameter in names.split()} | set(BANS)
    why = {parameter: reason for reason, names in EDITS.items() for parameter in names.split()}
    why |= dict.fromkeys(OWN.split(), "has a setting of the framework's own")
    for parameter, value in given.items():
        if parameter not in followed:
            what = f"{name(parameter)} with precision={config.precision!r}, align='exact'"
            required = f"no such parameter (it {why.get(parameter, 'is unknown')})"
            yield ConfigError(explain(what, required=required, found=repr(value), fix="drop it, or use align='linear'"))
