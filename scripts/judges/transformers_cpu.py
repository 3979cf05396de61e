"""A pytest plugin for transformers' modelling tests: with exact mode on, they judge converted models.

A trainer converts a model that is built or loaded, and so does this. A trainer never decodes, so converted models generate
without a cache. In both arms the tests' small models have the settings of published ones, where exact mode asks for them.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest

_TOWER = {"vision_config.hidden_act": "gelu_pytorch_tanh"}
#: family -> what its published models have and the tests' have not
_PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "topk_group": 2},
    "olmoe": {"rms_norm_eps": 1e-5},
    "qwen3_vl": _TOWER,
    "qwen3_vl_moe": {**_TOWER, "text_config.moe_intermediate_size": 48},  # with 16, a weight has the shape of its transpose
}


def pytest_configure(config: pytest.Config) -> None:
    import transformers

    from jetrl_patch import session
    from jetrl_patch.models import families

    for name, family in families.covering("exact").items():
        settings: Any = transformers.CONFIG_MAPPING[name]
        settings.__init__ = _as_published(settings.__init__, {"hidden_act": "silu", **_PUBLISHED.get(name, {})})
        if session.active_with(lambda config: config.exact):
            policy: Any = getattr(transformers, family.causal_lm)
            policy.__init__ = _then_convert(policy, policy.__init__)
            policy.from_pretrained = classmethod(_loaded(policy.from_pretrained.__func__))
            policy.generate = _without_cache(policy.generate)


def _as_published(initialize: Any, values: dict[str, Any]) -> Any:
    @functools.wraps(initialize)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        for path, value in values.items():
            owner, _, name = path.rpartition(".")
            setattr(getattr(self, owner) if owner else self, name, value)

    return made


def _then_convert(policy: Any, initialize: Any) -> Any:
    @functools.wraps(initialize)
    def converted(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        # tests build several models from one object, and a converted model notes its attention there
        initialize(self, copy.deepcopy(config), *args, **kwargs)
        if type(self) is policy and next(self.parameters()).device.type != "meta":  # loading fills one on meta
            _convert(self)

    return converted


def _loaded(load: Any) -> Any:
    @functools.wraps(load)
    def converted(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(cls, *args, **kwargs)
        _convert(result[0] if isinstance(result, tuple) else result)
        return result

    return converted


def _without_cache(generate: Any) -> Any:
    @functools.wraps(generate)
    def generated(self: Any, *args: Any, **kwargs: Any) -> Any:
        return generate(self, *args, **{**kwargs, "use_cache": False})

    return generated


def _convert(model: Any) -> None:
    from jetrl_patch import loop

    loop.convert(model)
