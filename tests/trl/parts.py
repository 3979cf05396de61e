"""Parts of a user's script: adapters, tools with an environment, and an engine that sleeps on a CPU."""

from __future__ import annotations

from typing import Any

#: as the words example's, with calls and answers of tools
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}{% for call in m['tool_calls'] or [] %} step {{ call['function']['name'] }}{{ call['function']['arguments'] }}\
{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def checkpoint_of(family: str, tokenizer: Any) -> str:
    """The folder of a tiny model of a family, which has learned nothing."""
    from tests.models import build

    model = build(family, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    return "model"


def adapters(given: dict[str, Any]) -> dict[str, Any]:
    from peft import LoraConfig

    return {"peft_config": LoraConfig(**given)}


class Environment:
    """Asked by every second answer of a model that knows no tools."""

    def reset(self, **_: Any) -> None:
        self.looks = 0

    def look(self) -> str:
        """Look."""
        self.looks += 1
        return "take ten" if self.looks > 1 else "step by step, i guess twenty"


def add(a: int) -> str:
    """Add.

    Args:
        a: a number.
    """
    return f"that makes {a} plus one"


def tools(tokenizer: Any) -> dict[str, Any]:
    """A parser finds a call in each answer of even length: the one of the environment, or the other one."""

    def parse_response(ids: list[int], **_: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"role": "assistant", "content": tokenizer.decode(ids)}
        if len(ids) % 2 == 0:
            call = {"name": "look", "arguments": {}} if len(ids) % 4 else {"name": "add", "arguments": {"a": len(ids)}}
            found["tool_calls"] = [{"type": "function", "function": call}]
        return found

    tokenizer.chat_template, tokenizer.response_template, tokenizer.parse_response = TEMPLATE, {}, parse_response
    return {"tools": [add], "environment_factory": Environment}


def let_engines_sleep() -> None:
    """Sleep mode needs a GPU. Here an engine that sleeps has bytes of 0x7f in its weights, NaN in FP8, and must not generate."""
    import vllm

    asleep: dict[int, set[str]] = {}
    init, generate = vllm.LLM.__init__, vllm.LLM.generate

    def built(self: Any, *args: Any, enable_sleep_mode: bool = False, **kwargs: Any) -> None:
        assert enable_sleep_mode
        init(self, *args, **kwargs)

    def sleep(self: Any, level: int) -> None:
        assert level == 2
        asleep[id(self)] = {"weights", "kv_cache"}
        self.collective_rpc(drop)

    def wake_up(self: Any, tags: list[str]) -> None:
        asleep[id(self)] -= set(tags)

    def awake(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert not asleep[id(self)]
        return generate(self, *args, **kwargs)

    vllm.LLM.__init__, vllm.LLM.sleep, vllm.LLM.wake_up, vllm.LLM.generate = built, sleep, wake_up, awake


def drop(worker: Any) -> None:
    import torch

    for parameter in worker.get_model().parameters():
        parameter.data.view(torch.uint8).fill_(0x7F)


def fsdp2(given: dict[str, Any]) -> dict[str, Any]:
    return {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"], **given}}


def let_accelerate_shard() -> None:
    """accelerate uses FSDP only where it found several GPUs."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState().distributed_type = DistributedType.MULTI_GPU


def end_in_a_sync(group: int) -> None:
    """Kill a process group when the next weight sync has made its first bucket."""
    import os
    import signal

    from jetrl_patch.trainer import server

    pack = server.pack

    def packed(*given: Any) -> Any:
        for bucket in pack(*given):
            os.killpg(group, signal.SIGKILL)
            yield bucket

    server.pack = packed
