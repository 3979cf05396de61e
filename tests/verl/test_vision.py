"""Batches of vision-language models in verl's own functions: the position ids of the dense computation, in any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl_patch import session
from jetrl_patch.adapters.verl import vision
from jetrl_patch.config import Config
from tests import forks
from tests import vision_models as models

#: tokens of each sample: the prompt's, the response's
LENGTHS = {
    "unequal": [(5, 3), (9, 1), (2, 7), (4, 4), (6, 6), (3, 2)],
    "equal": [(5, 3)] * 6,
    "equal, with other prompts": [(5, 3), (4, 4), (2, 6), (7, 1), (3, 5), (1, 7)],
    "as long as there are rows": [(3, 1)] * 4,
    "single": [(5, 3)],
}
ROWS = [2, 3, 4]


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "is_active", lambda: True)
    monkeypatch.setattr(session, "active_config", lambda: Config(precision="bf16").resolved())


def batch_of(lengths: list[tuple[int, int]], rows: int) -> tuple[Any, list[torch.Tensor]]:
    """verl's batch without padding, made by verl from a padded one, and each sample's position ids [rows, length]."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    generator = torch.Generator().manual_seed(rows)
    prompt, response = (max(pair[i] for pair in lengths) for i in (0, 1))
    mask = torch.zeros(len(lengths), prompt + response, dtype=torch.long)
    for row, (asked, answered) in zip(mask, lengths, strict=True):
        row[prompt - asked : prompt + answered] = 1
    positions = torch.randint(0, 1000, (len(lengths), rows, prompt + response), generator=generator)
    padded = tu.get_tensordict(
        {
            "input_ids": torch.randint(0, 100, mask.shape, generator=generator) * mask,
            "attention_mask": mask, "response_mask": mask[:, prompt:], "position_ids": positions,
        }
    )  # fmt: skip
    return left_right_2_no_padding(padded), [row[:, kept.bool()] for row, kept in zip(positions, mask, strict=True)]


def received(data: Any) -> Any:
    """A worker's chunk: verl's own consolidation, through pickle as in Ray."""
    import pickle

    from verl.protocol import BatchData

    (chunk,) = BatchData(data).chunk(1)
    return pickle.loads(pickle.dumps(chunk))


def fix(data: Any) -> None:
    from verl.utils.tensordict_utils import maybe_fix_3d_position_ids

    vision.fix_position_ids(maybe_fix_3d_position_ids)(data)


def assert_are(data: Any, expected: list[torch.Tensor]) -> None:
    """Assert each sample's positions, packed and padded as verl's engine reads them."""
    positions = data["position_ids"]
    assert positions.dim() == 3 and positions.shape[0] == len(expected)
    assert torch.equal(positions.values(), torch.cat(expected, 1))
    longest = max(t.shape[1] for t in expected)
    rows = expected[0].shape[0]
    padded = torch.nested.to_padded_tensor(positions, padding=0, output_size=(len(expected), rows, longest))
    for ours, theirs in zip(padded, expected, strict=True):
        assert torch.equal(ours[:, : theirs.shape[1]], theirs) and not ours[:, theirs.shape[1] :].any()


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", LENGTHS)
def test_every_split_of_a_batch_has_the_dense_positions(kind: str, rows: int) -> None:
    from verl.utils import tensordict_utils as tu

    data, expected = batch_of(LENGTHS[kind], rows)
    data = received(data)
    fix(data)
    assert_are(data, expected)
    fix(data)
    assert_are(data, expected)
    size = len(expected)
    for chunks in (n for n in range(1, size + 1) if size % n == 0):
        for i, chunk in enumerate(tu.chunk_tensordict(data, chunks)):
            assert_are(chunk, expected[i * size // chunks : (i + 1) * size // chunks])
            again = received(chunk)
            fix(again)
            assert_are(again, expected[i * size // chunks : (i + 1) * size // chunks])
    for batch, one in zip(tu.make_iterator(data, mini_batch_size=1, epochs=1, seed=0), expected, strict=True):
        fix(batch)
        assert_are(batch, [one])
    order = list(reversed(range(size)))
    assert_are(tu.index_select_tensor_dict(data, order), [expected[i] for i in order])


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", LENGTHS)
def test_a_driver_may_split_the_batch_before(kind: str, rows: int) -> None:
    from verl.utils import tensordict_utils as tu

    data, expected = batch_of(LENGTHS[kind], rows)
    size = len(expected)
    for chunks in (n for n in range(1, size + 1) if size % n == 0):
        for i, chunk in enumerate(tu.chunk_tensordict(data, chunks)):
            chunk = received(chunk)
            fix(chunk)
            assert_are(chunk, expected[i * size // chunks : (i + 1) * size // chunks])


@pytest.mark.parametrize("kind", ["equal", "equal, with other prompts", "single"])
def test_verl_itself_still_fails_on_samples_of_one_length(kind: str) -> None:
    """Fails once verl lays out what it packs: then the patch can go."""
    from verl.utils import tensordict_utils as tu

    data, _ = batch_of(LENGTHS[kind], 4)
    tu.maybe_fix_3d_position_ids(data)
    with pytest.raises(RuntimeError, match=r"split_with_sizes|Expected cond to be True"):
        data["position_ids"].unbind()


@pytest.mark.usefixtures("active")
def test_other_batches_are_left_alone() -> None:
    from verl.utils import tensordict_utils as tu

    flat = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged)
    data = tu.get_tensordict({"input_ids": flat, "position_ids": flat})
    before = data["position_ids"]
    fix(data)
    assert data["position_ids"] is before
    dense = tu.get_tensordict({"position_ids": torch.zeros(2, 4, 8)})
    fix(dense)
    fix(tu.get_tensordict({"input_ids": flat}))


def test_positions_of_other_tokens_are_an_error() -> None:
    offsets = torch.tensor([0, 3, 8])
    for values in (torch.zeros(4, 7), torch.zeros(8, 4), torch.zeros(7, 4)):
        with pytest.raises(ValueError, match=r"position ids \(\d, \d\) do not match a batch with offsets \[0, 3, 8\]"):
            vision.along_tokens(values, offsets)


@pytest.mark.usefixtures("active")
def test_a_batch_without_an_image_is_embedded_as_text_and_uses_the_tower() -> None:
    from verl.models.transformers import qwen2_vl

    model = models.build("qwen2_5_vl").model
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(AttributeError, match="mean"):  # fails once verl unpacks the output: then remove the patch
        qwen2_vl._get_input_embeds(model, ids)
    embeds, mask = vision.input_embeds(qwen2_vl._get_input_embeds)(model, ids, torch.ones(1, 3))
    assert torch.equal(embeds, model.get_input_embeddings()(ids)) and torch.equal(mask, torch.ones(1, 3))
    embeds.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.visual.parameters())
    with_image = vision.input_embeds(lambda *args: args)(model, ids, None, "pixels", None, "grid", None)
    assert with_image == (model, ids, None, "pixels", None, "grid", None)


@pytest.mark.usefixtures("active")
def test_a_tower_whose_output_is_no_tensor_is_unpacked() -> None:
    from verl.models.transformers import glm4v

    model = models.build("glm4v").model
    place, pixels = models.FIRST + 2, torch.randn(16, 3 * 2 * 14 * 14, dtype=torch.bfloat16)
    seen = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    ids = torch.tensor([[5, *[place] * 4, 6, 7]])
    fixed = vision.image_embeds(glm4v._get_input_embeds)
    for call, what in ((lambda: glm4v._get_input_embeds(model, ids, **seen), "shape"), (lambda: without(model), "mean")):
        with pytest.raises(AttributeError, match=what):  # fails once verl unpacks the output: then remove the patch
            call()
    embeds, mask = fixed(model, ids, torch.ones(1, 7), **seen)
    assert torch.equal(embeds[0, 1:5], model.get_image_features(**seen, return_dict=True).pooler_output[0])
    words = model.get_input_embeddings()(ids)
    assert torch.equal(embeds[0, [0, 5, 6]], words[0, [0, 5, 6]]) and torch.equal(mask, torch.ones(1, 7))
    embeds, _ = fixed(model, ids)
    assert torch.equal(embeds, words)
    embeds.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.visual.parameters())


def without(model: Any) -> Any:
    from verl.models.transformers import glm4v

    return glm4v._get_input_embeds(model, torch.tensor([[5, 6, 7]]))


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("family", models.FAMILIES)
def test_vllm_gets_one_token_for_each_image(family: str) -> None:
    from types import SimpleNamespace

    from verl.workers.rollout.utils import qwen2_5_vl_dedup_image_tokens

    places = {"image_token_id": models.FIRST + 2, "video_token_id": models.FIRST + 3}
    kind = type("Glm4vImageProcessor" if family == "glm4v" else "Qwen2VLImageProcessor", (), {})
    processor = SimpleNamespace(config=models.config_of(family), image_processor=kind(), **places)
    before, after, image, film = (models.FIRST + i for i in range(4))
    prompt = [before, *[image] * 5, after, 7, 7, before, *[image] * 3, after, film, film, 9]
    short = [before, image, after, 7, 7, before, image, after, film, 9]
    fixed = vision.one_for_each(qwen2_5_vl_dedup_image_tokens)
    assert fixed(prompt, processor) == short
    # fails once verl does so for every processor: then remove the patch
    assert (qwen2_5_vl_dedup_image_tokens(prompt, processor) == short) is (family != "glm4v")
    other = SimpleNamespace(config=None, image_processor=None)
    assert fixed(prompt, other) == prompt and fixed(prompt, None) == prompt


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    def make(family: str) -> str:
        path = tmp_path_factory.mktemp("vision") / family
        models.build(family).save_pretrained(path)
        return str(path)

    return make


def torchrun(ranks: int, script: str, *words: str) -> str:
    """Run a script of this folder on this many ranks; return its output."""
    done = forks.run(Path(__file__).with_name(script), *words, ranks=ranks)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("strategy", "family", "ranks", "more"),
    [
        ("fsdp2", "qwen2_5_vl", 2, ["fused"]),
        ("fsdp", "qwen3_vl", 1, []),
        ("fsdp2", "qwen3_5", 1, []),
        pytest.param("fsdp2", "qwen3_5", 2, ["fused"], marks=pytest.mark.slow),
        pytest.param("fsdp", "qwen3_5_moe", 1, [], marks=pytest.mark.slow),
        ("fsdp2", "glm4v", 1, []),
        ("fsdp2", "qwen3_vl_moe", 2, ["fused", "shared"]),
        pytest.param("fsdp2", "qwen3_vl", 2, ["shared"], marks=pytest.mark.slow),
        pytest.param("fsdp2", "qwen2_5_vl", 2, ["shared"], marks=pytest.mark.slow),
        pytest.param("fsdp2", "glm4v", 2, ["fused", "shared"], marks=pytest.mark.slow),
        pytest.param("fsdp2", "glm4v", 2, ["fused"], marks=pytest.mark.slow),
        pytest.param("fsdp2", "qwen3_vl_moe", 2, ["fused"], marks=pytest.mark.slow),
        pytest.param("fsdp2", "qwen3_vl", 2, ["fused"], marks=pytest.mark.slow),
        pytest.param("fsdp2", "qwen3_vl", 1, [], marks=pytest.mark.slow),
        pytest.param("fsdp2", "qwen2_5_vl", 1, [], marks=pytest.mark.slow),
        pytest.param("fsdp", "qwen2_5_vl", 1, ["fused"], marks=pytest.mark.slow),
    ],
)
def test_verls_engine_computes_what_transformers_does(
    checkpoint: Callable[[str], str], strategy: str, family: str, ranks: int, more: list[str]
) -> None:
    assert "WORST" in torchrun(ranks, "vision_engine_script.py", strategy, family, checkpoint(family), *more)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("strategy", "family", "ranks", "precision", "exclude"),
    [
        ("fsdp2", "qwen2_5_vl", 1, "fp8-unified", ".*visual.*"),  # as verl's own script
        pytest.param("fsdp2", "qwen2_5_vl", 2, "fp8-unified", "", marks=pytest.mark.slow),
        pytest.param("fsdp", "qwen2_5_vl", 2, "fp8-rollout", "", marks=pytest.mark.slow),
        pytest.param("fsdp", "glm4v", 1, "fp8-unified", "", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_sees_trains_adapters_with_the_weights_that_it_sends(
    checkpoint: Callable[[str], str], tmp_path: Path, strategy: str, family: str, ranks: int, precision: str, exclude: str
) -> None:
    words = (strategy, family, checkpoint(family), str(tmp_path), precision, *[exclude] * bool(exclude))
    assert "FINE" in torchrun(ranks, "vision_lora_script.py", *words)
