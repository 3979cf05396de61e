"""Engines of models with a vision tower, in a process that has torchvision.

    python -m tests.vllm.vision_script sync DIR DIR MODE
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import pytest
import torch

import jetrl_patch
from jetrl_patch import AuditError, JetrlError, SyncError
from jetrl_patch.adapters.vllm.sample import build_engine
from jetrl_patch.adapters.vllm.shards import hf_name
from jetrl_patch.measure.parity import Job
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
    given |= {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2, "video": 0}, "mm_processor_cache_gb": 0}
    return build_engine(Job(model=path, config=jetrl_patch.status().config, batch=32, tp=tp, engine=tuple(given.items())), 256)


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


def mismatch(llm: Any, model: Any, path: str, shown: Any) -> float:
    """Mean difference of log-probs between the engine, which saw ``picture(0)``, and the trainer's model, given ``shown``."""
    from transformers import AutoProcessor
    from vllm import SamplingParams

    prompt = f"{image_of(llm)}what?"
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, logprobs=0, seed=1)
    image = {"prompt": prompt, "multi_modal_data": {"image": vision_models.picture(0)}}
    (output,) = llm.generate([image], params, use_tqdm=False)
    response = list(output.outputs[0].token_ids)
    theirs = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, response, strict=True)]
    given = AutoProcessor.from_pretrained(path)(text=[prompt], images=[shown], return_tensors="pt")
    assert given["input_ids"][0].tolist() == output.prompt_token_ids
    length = len(output.prompt_token_ids)
    ids = torch.tensor([[*output.prompt_token_ids, *response]])
    kinds = torch.nn.functional.pad(given["mm_token_type_ids"], (0, len(response)))
    seen = {"pixel_values": given["pixel_values"].to(torch.bfloat16), "image_grid_thw": given["image_grid_thw"]}
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **seen).logits[0, length - 1 : -1]
    ours = logits.float().log_softmax(-1).gather(1, ids[0, length:, None])[:, 0]
    return float((ours - torch.tensor(theirs)).abs().mean())


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
    same, other = (mismatch(llm, model, second, vision_models.picture(seed)) for seed in (0, 5))
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


def requests(llm: Any, count: int, seed: int) -> list[dict[str, Any]]:
    """Prompts with no, one or two images of several sizes, some of which occur in several prompts."""
    image, asked = image_of(llm), []
    for number in range(seed, seed + count):
        pictures = [vision_models.picture(place % 11, 64 + 32 * (place % 3)) for place in range(number, number + number % 3)]
        prompt = f"{number % 5}?" + "".join(f"{image} and {place}" for place in range(len(pictures))) + "=" * (number % 7 + 1)
        asked.append({"prompt": prompt, **({"multi_modal_data": {"image": pictures}} if pictures else {})})
    return asked


def score(model: Any, path: str, asked: list[dict[str, Any]], outputs: list[Any], temperature: float) -> list[list[float]]:
    """The trainer's log-probs of the responses, packed into rows of five sequences with position ids of four rows."""
    from transformers import AutoProcessor

    from jetrl_patch.exact import ops

    processor, found = AutoProcessor.from_pretrained(path), []
    for start in range(0, len(asked), 5):
        rows, positions, seen, places = [], [], [], []
        for request, output in zip(asked[start : start + 5], outputs[start : start + 5], strict=True):
            pictures = request.get("multi_modal_data", {}).get("image")
            given = processor(text=[request["prompt"]], images=pictures, return_tensors="pt")
            assert given["input_ids"][0].tolist() == output.prompt_token_ids
            response = torch.tensor(output.outputs[0].token_ids)
            ids = torch.cat((given["input_ids"][0], response))
            angles = torch.arange(len(ids)).expand(3, -1)
            if pictures:
                kinds = torch.nn.functional.pad(given["mm_token_type_ids"], (0, len(response)))
                angles = model.model.get_rope_index(ids[None], kinds, image_grid_thw=given["image_grid_thw"])[0][:, 0]
                seen.append((given["pixel_values"], given["image_grid_thw"]))
            first = sum(map(len, rows)) + len(ids) - len(response)
            places.append(range(first - 1, first - 1 + len(response)))
            rows.append(ids)
            positions.append(torch.cat((torch.arange(len(ids))[None], angles)))
        ids = torch.cat(rows)[None]
        images = {key: torch.cat(parts) for key, parts in zip(("pixel_values", "image_grid_thw"), zip(*seen, strict=False))}
        with torch.no_grad():
            logits = model(input_ids=ids, position_ids=torch.cat(positions, 1)[:, None], use_cache=False, **images).logits[0]
        log_probs = ops.token_log_probs(logits[:-1], ids[0, 1:], temperature)
        found += [[float(log_probs[place]) for place in part] for part in places]
    return found


def exact(first: str, second: str, caching: str, chunks: str, ranks: str = "1") -> None:
    """Trainer and rollout agree in every bit: with images and without, in any batch, before and (one rank) after a sync."""
    from vllm import SamplingParams

    jetrl_patch.enable(precision="fp8-unified")
    split = {"enable_prefix_caching": caching == "cached", "max_num_batched_tokens": 48 if chunks == "chunked" else 4096}
    tp = int(ranks)
    llm = engine(first, tp, **split)
    params = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True, logprobs=0)
    for path in (first, second)[: 1 if tp > 1 else 2]:
        model, source = trainer(path, tp)
        if path == second:
            items, _ = sent(model, source)
            push(worker_of(llm), items)
            llm.reset_prefix_cache()
            llm.llm_engine.reset_encoder_cache()
        for size in (1, 7, 32):
            asked = requests(llm, size, 2 * size)
            outputs = llm.generate(asked, params, use_tqdm=False)
            # a placeholder in a response would need an image of its own
            kept = [not {*one.outputs[0].token_ids} & {vision_models.FIRST + 2, vision_models.FIRST + 3} for one in outputs]
            asked, outputs = ([*itertools.compress(given, kept)] for given in (asked, outputs))
            assert len(outputs) > size / 2
            theirs = [
                [entry[token].logprob for entry, token in zip(one.outputs[0].logprobs, one.outputs[0].token_ids, strict=True)]
                for one in outputs
            ]
            ours = score(model, path, asked, outputs, 0.8)
            wrong = [number for number, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
            assert not wrong, (path, size, wrong, ours[wrong[0]], theirs[wrong[0]])
            assert size == 1 or torch.tensor(theirs).std() > 0.3  # flat logits would prove nothing
            print("equal", caching, chunks, size, sum(map(len, ours)))


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
