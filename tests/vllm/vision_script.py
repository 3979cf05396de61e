"""Engines of models with a vision tower, in a process that has torchvision.

    python -m tests.vllm.vision_script sync DIR DIR MODE
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import pytest
import torch

import jetrl_patch
from jetrl_patch import AuditError, JetrlError, SyncError
from jetrl_patch.adapters.vllm.sample import build_engine, generate, make_pictures
from jetrl_patch.adapters.vllm.shards import hf_name
from jetrl_patch.cli.parity.score import log_probs
from jetrl_patch.exact import ops
from jetrl_patch.measure.parity import Job, Sample
from jetrl_patch.measure.pictures import Picture
from jetrl_patch.models.families import FAMILIES
from jetrl_patch.models.structure import has_delta_nets
from jetrl_patch.sync.send import SyncStats
from jetrl_patch.trainer.source import Source, convert
from tests import vision_models
from tests.fp8.thresholds import MISMATCH
from tests.vllm.test_weights import in_engine, push, worker_of

MODES: dict[str, dict[str, Any]] = {
    "linear": {"precision": "fp8-unified", "align": "linear"},
    "fp8-rollout": {"precision": "fp8-rollout"},
    "channel": {"precision": "fp8-rollout", "rollout_granularity": "channel"},
}


def engine(path: str, tp: int = 1, **given: Any) -> Any:
    given |= {"mm_processor_cache_gb": 0}
    return build_engine(Job(model=path, config=jetrl_patch.status().config, batch=32, tp=tp, engine=tuple(given.items())), 512)


def trainer(path: str, tp: int = 1) -> tuple[Any, Source]:
    """The model as a training framework loads it, and what it sends."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return model, convert(model, jetrl_patch.status().config, shapes, rollout_tp=tp, device_type="cpu")


def sent(model: Any, source: Source) -> tuple[list[Any], SyncStats]:
    stats = SyncStats()
    return list(source.stream(model.state_dict().items(), stats)), stats


def image_of(llm: Any) -> str:
    return vision_models.image(llm.model_config.hf_config.model_type)


def answers(llm: Any) -> list[list[int]]:
    """Greedy answers to a text, to an image, and to a text and two images."""
    from vllm import SamplingParams

    image = image_of(llm)
    prompts = [
        {"prompt": "1+2="},
        {"prompt": f"{image}what?", "multi_modal_data": {"image": vision_models.picture(0)}},
        {
            "prompt": f"{image} or {image}?",
            "multi_modal_data": {"image": [vision_models.picture(1), vision_models.picture(2, 96)]},
        },
    ]
    llm.reset_prefix_cache()
    llm.reset_mm_cache()
    llm.llm_engine.reset_encoder_cache()  # it holds what the tower made of images with its old weights; verl resets it too
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def mismatch(llm: Any, model: Any, pictures: list[Picture]) -> list[float]:
    """Mean difference of log-probs between the engine, which saw the first picture, and the trainer's model, given each."""
    prompt = llm.get_tokenizer().encode(f"{image_of(llm)}what?")
    (sample,) = generate(llm, [prompt], 24, 1.0, [pictures[:1]])
    with torch.no_grad():
        ours = [log_probs(model, [replace(sample, pictures=[picture])], 1.0) for picture in pictures]
    return [float((found - torch.tensor(sample.log_probs)).abs().mean()) for found in ours]


def parameters(llm: Any) -> dict[str, torch.Tensor]:
    return dict(worker_of(llm).model_runner.get_model().named_parameters())


def sync(first: str, second: str, mode: str) -> None:
    """After a sync, an engine that was built from ``first`` is one that was built from ``second``."""
    jetrl_patch.enable(**MODES[mode])
    llm, fresh = engine(first), engine(second)
    model, source = trainer(second)
    assert source.layers and all(name.startswith("model.language_model.layers.") for name in source.layers)
    (report,) = llm.collective_rpc("jetrl_report")
    assert set(report["layers"]) == set(source.layers)
    tower = {name: p for name, p in parameters(llm).items() if name.startswith("visual.")}
    assert len(tower) > 20 and all(p.dtype == torch.bfloat16 for p in tower.values())

    before = answers(llm)
    items, stats = sent(model, source)
    assert push(worker_of(llm), items)["layers"] == len(source.layers)
    assert in_engine(llm) == in_engine(fresh)
    if mode == "linear":  # the others send BF16
        quantized = {f"{layer}.{kind}" for layer in source.layers for kind in ("weight", "weight_scale_inv")}
        assert in_engine(llm) == {name: stats.digests[name] for name in quantized}
    theirs = parameters(fresh)
    for name, tensor in parameters(llm).items():
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name
    name = "visual.patch_embed.proj.weight"
    assert torch.equal(tower[name], model.state_dict()[f"model.{name}"])
    found, expected = answers(llm), answers(fresh)
    assert found == expected, (found, expected)
    assert all(a != b for a, b in zip(found, before, strict=True)), (before, found)
    same, other = mismatch(llm, model, [make_pictures(second)[number] for number in (0, 9)])  # of one size
    print("mismatch", mode, same, "with another image", other)
    # FP8 in a model of random weights: pixels times 1.004 move its log-probs as far; each side chooses experts by itself
    assert same < MISMATCH[MODES[mode]["precision"] if source.experts else "dense"]
    clear = 3.0 if not has_delta_nets(model.config) else 2.0 if mode == "linear" else 1.2  # a state hands the noise on
    assert clear * same < other


def broken(first: str, second: str, mode: str) -> None:
    """A tensor that is missing or has another name is one error, and so is a layer that only the rollout quantizes."""
    jetrl_patch.enable(**MODES[mode])
    llm = engine(first)
    model, source = trainer(second)
    worker, (items, _) = worker_of(llm), sent(model, source)

    def without(name: str) -> Iterator[Any]:
        return (item for item in items if item[0] != name)

    def renamed(name: str) -> Iterator[Any]:
        return ((f"language_model.{key}" if key == name else key, value) for key, value in items)

    layer = source.layers[-1]
    tower = next(name for name, _ in items if ".visual." in name)
    for name in (tower, f"{layer}.weight", f"{layer}.weight_scale_inv"):
        for change in (without, renamed):
            refused(lambda: push(worker, list(change(name))), SyncError, re.escape(name))  # noqa: B023
            assert llm.collective_rpc("jetrl_report", kwargs={"digests": False})[0]["state"] == "failed"
    refused(lambda: worker.execute_model(None), SyncError, "does not generate")
    source.layers.remove(layer)
    refused(lambda: push(worker, sent(model, source)[0]), AuditError, f"only in the rollout: {re.escape(layer)}\\.")
    push(worker, items)
    answers(llm)


def score(model: Any, samples: Sequence[Sample], temperature: float) -> list[list[float]]:
    """The trainer's log-probs of the responses, packed into rows of five sequences with position ids of four rows."""
    found: list[list[float]] = []
    for start in range(0, len(samples), 5):
        rows, positions, places = [], [], []
        packed = samples[start : start + 5]
        for s in packed:
            ids = torch.tensor([*s.prompt, *s.response[:-1]])
            angles = torch.arange(len(ids)).expand(3, -1)
            if s.pictures:
                kinds, grids = (ids == model.config.image_token_id).int()[None], torch.cat([p.grid for p in s.pictures])
                angles = model.model.get_rope_index(ids[None], kinds, image_grid_thw=grids)[0][:, 0]
            first = sum(map(len, rows)) + len(s.prompt) - 1
            places.append(range(first, first + len(s.response)))
            rows.append(ids)
            positions.append(torch.cat((torch.arange(len(ids))[None], angles)))
        pictures = [picture for s in packed for picture in s.pictures]
        images = {"pixel_values": [p.pixels for p in pictures], "image_grid_thw": [p.grid for p in pictures]} if pictures else {}
        with torch.no_grad():
            logits = model(
                input_ids=torch.cat(rows)[None],
                position_ids=torch.cat(positions, 1)[:, None],
                use_cache=False,
                **{key: torch.cat(parts) for key, parts in images.items()},
            ).logits[0]
        for s, place in zip(packed, places, strict=True):
            found.append(ops.token_log_probs(logits[place], torch.tensor(s.response), temperature).tolist())
    return found


def of_one_prefix(llm: Any) -> tuple[list[list[int]], list[Any]]:
    """Prompts that begin with the same images and the same 396 bytes: more than a block of vLLM's cache of states."""
    start, seen = next(pair for pair in zip(*vision_models.prompts(llm, 3), strict=True) if pair[1])
    encode = llm.get_tokenizer().encode
    return [[*start, *encode("3+4=7;" * 66 + str(end) * (end % 5 + 1))] for end in range(12)], [seen] * 12


def exact(first: str, second: str, caching: str, chunk: str, ranks: str = "1") -> None:
    """Trainer and rollout agree in every bit: with images and without, in any batch, before and (one rank) after a sync."""
    from vllm import SamplingParams

    jetrl_patch.enable(precision="fp8-unified")
    split = {"enable_prefix_caching": caching == "cached", "max_num_batched_tokens": int(chunk)}
    tp = int(ranks)
    llm = engine(first, tp, **split)
    for path in (first, second)[: 1 if tp > 1 else 2]:
        model, source = trainer(path, tp)
        if path == second:
            items, _ = sent(model, source)
            push(worker_of(llm), items)
            llm.reset_prefix_cache()
            llm.llm_engine.reset_encoder_cache()
        for asked, shown in (*(vision_models.prompts(llm, size) for size in (1, 7, 32)), *[of_one_prefix(llm)] * 2):
            size = len(asked)
            samples = generate(llm, asked, 12, 0.8, shown)
            ours, theirs = score(model, samples, 0.8), [s.log_probs for s in samples]
            wrong = [number for number, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
            assert not wrong, (path, size, wrong, ours[wrong[0]], theirs[wrong[0]])
            assert size == 1 or torch.tensor([*itertools.chain(*theirs)]).std() > 0.3  # flat logits would prove nothing
            print("equal", caching, chunk, size, sum(map(len, ours)))
        again: Any = {"prompt_token_ids": asked[0], "multi_modal_data": {"image": [picture.image for picture in shown[0]]}}
        (last,) = llm.generate([again], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        assert (last.num_cached_tokens >= 256) is (caching == "cached")


def refused_exact(first: str) -> None:
    """Exact mode is refused by name, before there is an engine."""
    jetrl_patch.enable(precision="fp8-unified")
    refused(lambda: engine(first), JetrlError, r"found model_type='\w+' \(its (vision tower|gated delta).*Use align=\"linear\"")


def names(*families: str) -> None:
    """vLLM's own map leads from transformers' names to vLLM's, and back; what vLLM merges is what the record says."""
    from vllm.model_executor.models.registry import ModelRegistry

    for family in families:
        record = FAMILIES[family]
        model = ModelRegistry._try_load_model_cls(record.causal_lm)
        assert model is not None
        mapper = model.hf_to_vllm_mapper.get_rename_mapper()
        theirs = [name for name, _ in vision_models.build(family).named_modules() if ".layers.0." in name or ".blocks.0." in name]
        theirs.append("lm_head.weight")
        assert hf_name("language_model.lm_head", mapper) == "lm_head"  # a module, whose name is all of a prefix
        assert len(theirs) > 20
        for name in theirs:
            (ours,) = mapper.apply_list([name])
            assert ours != name and hf_name(ours, mapper) == name, name
        merged = {tuple(parts) for parts in model.packed_modules_mapping.values() if len(parts) > 1}
        assert merged == set(record.merged), merged


def refused(call: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        call()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    print("FINE")
