"""Vision-language models in OpenRLHF: what is accepted and refused, tokens never sampled, caches cleared."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jetrl_patch import session
from jetrl_patch.adapters.openrlhf import model as trained
from jetrl_patch.adapters.openrlhf import settings
from jetrl_patch.adapters.openrlhf import vision as checks
from jetrl_patch.adapters.openrlhf.state import WORKER
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError
from jetrl_patch.models.families import FAMILIES
from jetrl_patch.sync.orders import encode
from tests import vision_models
from tests.models import config_of
from tests.openrlhf.test_settings import BF16, EXACT, LINEAR, arguments

ROLLOUT = Config(precision="fp8-rollout")


def told(config: Any, path: Path, mode: Config, **changes: Any) -> list[str]:
    config.save_pretrained(path)
    found = settings.problems(arguments(actor__model_name_or_path=str(path), **changes), mode)
    return [f"{type(error).__name__}: {error}" for error in found]


MIXTURES = [family for family in vision_models.FAMILIES if FAMILIES[family].mixture]


@pytest.mark.parametrize("mode", [LINEAR, ROLLOUT, BF16, Config(precision="fp16")])
@pytest.mark.parametrize("family", [family for family in vision_models.FAMILIES if family not in MIXTURES])
def test_images_are_accepted_where_the_model_sees(tmp_path, family, mode):
    assert told(vision_models.config_of(family), tmp_path, mode, data__max_images_per_prompt=1) == []
    assert told(vision_models.config_of(family), tmp_path, mode, train__async_enable=True) == []


@pytest.mark.parametrize("family", [family for family in vision_models.FAMILIES if family not in MIXTURES])
def test_exact_mode_is_accepted_where_it_covers_the_tower(tmp_path, family):
    found = told(vision_models.config_of(family), tmp_path, EXACT, data__max_images_per_prompt=1)
    if family != "glm4v":
        assert found == []
    else:
        assert len(found) == 1 and re.search(r"ModelError: align=\"exact\": required .*found model_type='glm4v'", found[0])


@pytest.mark.parametrize(
    ("mode", "changes", "says"),
    [
        (Config(precision="int8-rollout"), {}, r"ModelError: model_type='qwen3_5' .*required one text model, or with an FP8"),
        (LINEAR, {"ds__lora__rank": 8}, r"ModelError: LoRA in OpenRLHF .*found model_type='qwen3_5'"),
        (LINEAR, {"ds__packing_samples": True}, r"--ds\.packing_samples with model_type='qwen3_5': required one sample a row"),
        (ROLLOUT, {"train__partial_rollout_enable": True}, r"--train\.partial_rollout_enable .*required whole rollouts"),
        (LINEAR, {"vllm__tensor_parallel_size": 4}, r"ModelError: .*cuts a block of 128"),
    ],
)
def test_what_is_not_handled_is_one_error(tmp_path, mode, changes, says):
    (problem,) = told(vision_models.config_of("qwen3_5"), tmp_path, mode, data__max_images_per_prompt=1, **changes)
    assert re.search(says, problem), problem


@pytest.mark.parametrize("mode", [LINEAR, ROLLOUT])
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_beside_a_tower_are_refused(tmp_path, family, mode):
    (problem,) = told(vision_models.config_of(family), tmp_path, mode)
    assert problem.startswith("ModelError") and "required no experts with a vision tower" in problem
    assert told(vision_models.config_of(family), tmp_path, BF16) == []


def test_images_for_a_model_of_text_are_refused(tmp_path):
    (problem,) = told(config_of("qwen3"), tmp_path, LINEAR, data__max_images_per_prompt=2)
    assert "max_images_per_prompt with model_type='qwen3': required 0 for a model without a vision tower, found 2" in problem
    assert told(config_of("qwen3"), tmp_path, BF16, data__max_images_per_prompt=2) == []
    assert told(config_of("qwen3"), tmp_path, LINEAR, ds__packing_samples=True, train__partial_rollout_enable=True) == []


def test_a_remote_model_is_refused_in_the_worker(monkeypatch):
    monkeypatch.setattr(WORKER, "args", arguments(ds__packing_samples=True))
    with pytest.raises(ConfigError, match=r"--ds\.packing_samples .*required one sample a row"):
        trained.prepare(SimpleNamespace(config=vision_models.config_of("qwen3_vl")), LINEAR, None)


@pytest.fixture
def active(monkeypatch):
    monkeypatch.setattr(session, "is_active", lambda: True)
    monkeypatch.setattr(session, "active_config", lambda: LINEAR.resolved())


def engine(hf_config: Any) -> Any:
    resets: list[int] = []

    async def reset_encoder_cache() -> None:
        resets.append(1)

    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config), reset_encoder_cache=reset_encoder_cache, resets=resets
    )


@pytest.mark.usefixtures("active")
def test_no_response_has_a_token_in_place_of_an_image():
    generate = checks.never_samples(lambda self, prompt, params, **_: params.logit_bias)
    for family in vision_models.FAMILIES:
        config = vision_models.config_of(family)
        tokens = (config.image_token_id, config.video_token_id)
        given = SimpleNamespace(logit_bias={5: 1.0})
        assert generate(engine(config), {}, given, request_id="a") == {5: 1.0, **dict.fromkeys(tokens, -100.0)}
    assert generate(engine(config_of("qwen3")), {}, SimpleNamespace(logit_bias=None), request_id="a") is None


@pytest.mark.usefixtures("active")
def test_what_the_tower_made_is_dropped_after_a_sync_and_at_no_other_time():
    async def original(self: Any, method: Any, timeout: Any, args: Any, kwargs: Any) -> str:
        return "done"

    rpc = checks.forget_images(original)

    def resets(hf_config: Any, method: str, *args: Any) -> int:
        llm = engine(hf_config)
        assert asyncio.run(rpc(llm, method, None, args, None)) == "done"
        return len(llm.resets)

    sees, reads = vision_models.config_of("qwen3_vl"), config_of("qwen3")
    for order, times in (("begin", 0), ("bucket", 0), ("status", 0), ("end", 1)):
        assert resets(sees, "update_weight", encode(order), torch.uint8, (0,), False) == times
        assert resets(reads, "update_weight", encode(order), torch.uint8, (0,), False) == 0
    for last in (False, True):  # OpenRLHF's own sync
        assert resets(sees, "update_weight", "lm_head.weight", torch.bfloat16, (4,), last) == last
        assert resets(sees, "update_weight_cuda_ipc", "lm_head.weight", torch.bfloat16, (4,), {}, last) == last
    assert resets(sees, "init_process_group", "127.0.0.1", 1, True) == 0


@pytest.mark.usefixtures("active")
def test_a_sync_that_fails_resets_nothing():
    async def fails(self: Any, *_: Any) -> None:
        raise RuntimeError("no")

    llm = engine(vision_models.config_of("qwen3_vl"))
    with pytest.raises(RuntimeError):
        asyncio.run(checks.forget_images(fails)(llm, "update_weight", None, (encode("end"), None, (0,), False), None))
    assert llm.resets == []


def test_openrlhfs_own_sync_leaves_out_what_is_frozen():
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad = False
    for sees, count in ((True, 1), (False, 2)):
        assert len(checks.synced(SimpleNamespace(model=SimpleNamespace(module=model), is_vlm=sees))) == count
