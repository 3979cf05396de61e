"""The adapter of ``tinyrl``: where the framework loads its model, syncs, computes log-probs and compares them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jetrl_patch.patching.attached import Attached
from jetrl_patch.patching.patch import needed, replacement
from jetrl_patch.registry import Adapter, Config, Patch

SOURCE: Attached[Any] = Attached("jetrl_source", "the trainer keeps the model, and passes nothing else from one call to the next")


@replacement
def load_model(original: Any, self: Any, path: str) -> Any:
    from jetrl_patch import loop

    model = original(self, path)
    SOURCE.set(self, loop.convert(model))
    return model


@replacement
def sync(original: Any, self: Any) -> None:
    from jetrl_patch import loop

    loop.send(SOURCE.get(self), self.model.state_dict(), self.engine)


@replacement
def log_probs(original: Any, self: Any, tokens: Any) -> Any:
    import torch
    from tinyrl import LENGTH, TEMPERATURE

    from jetrl_patch import loop

    return loop.log_probs(self.model, tokens, torch.ones_like(tokens), TEMPERATURE, last=LENGTH)


@replacement
def loss(original: Any, self: Any, new: Any, old: Any, rewards: Any) -> Any:
    from jetrl_patch import loop

    loop.compare(new, old, old.isfinite())  # in exact mode a token that differs is an AuditError
    return original(self, new, old, rewards)


def _patch(replaced: Any, reason: str) -> Patch:
    name = f"Trainer.{replaced.__name__}"
    return Patch("tinyrl", name, replaced, reason=reason, remove_when="tinyrl calls jetrl_patch.loop itself")


PATCHES = (
    _patch(load_model, "tinyrl loads a BF16 model, which would not compute as the rollout does"),
    _patch(sync, "tinyrl writes BF16 weights, which the engine refuses"),
    _patch(log_probs, "tinyrl's log_softmax adds in another order than the engine"),
    _patch(loss, "tinyrl compares the log-probs of rollout and trainer nowhere"),
)


class TinyAdapter(Adapter):
    """tinyrl 1: one process, one rank."""

    name = "tinyrl"
    requires = ("torch", "transformers", "vllm", "tinyrl>=1,<2")

    def patches(self, config: Config) -> Sequence[Patch]:
        return needed(PATCHES, config)


ADAPTER = TinyAdapter()
