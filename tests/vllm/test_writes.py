"""Scripts with a trainer that the plugin does not know: an error before the first token, and no stale or mixed weights later.

Plain inference works, and so does an engine of a reward model beside the rollout.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch import ConfigError, SyncError, registry
from jetrl_patch.errors import ConflictError
from jetrl_patch.measure.parity import Job
from jetrl_patch.trainer.foreign import PACKAGES
from tests.models import config_of
from tests.trl import needs_trl, run_python
from tests.vllm.test_weights import push, stream, weights_of, worker_of

WORDS = Path(__file__).resolve().parents[2] / "examples" / "words" / "checkpoint"
PROMPTS = [[5, 6, 7, 8], [9, 10]]
PATCHED = re.escape(registry.trainers())


def copied(model: torch.nn.Module) -> None:
    """Write the weights as ``load_state_dict`` does."""
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})


#: how a loop of the user's own may write weights: with the model's loader, as vLLM's examples do; through vLLM; tensor by tensor
WRITES: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "load_weights": (lambda worker, weights: worker.model_runner.get_model().load_weights(weights.items()), True),
    "reload_weights": (lambda worker, weights: worker.reload_weights(), True),
    "reload_weights of these": (lambda worker, weights: worker.reload_weights(weights_iterator=weights.items()), True),
    "copy_": (lambda worker, weights: copied(worker.model_runner.get_model()), False),
}


@pytest.mark.e2e
@pytest.mark.parametrize(("way", "precision"), [*((way, "fp8-unified") for way in WRITES), ("load_weights", "fp8-rollout")])
def test_a_loop_of_the_users_own(checkpoint: Callable[..., str], engine: Callable[..., Any], way: str, precision: str) -> None:
    from jetrl_patch.adapters.vllm.sample import generate

    first, second = checkpoint("qwen3"), checkpoint("qwen3", seed=1)
    jetrl_patch.enable(precision=precision)
    config = jetrl_patch.status().config
    llm = engine(Job(model=first, config=config))
    generate(llm, PROMPTS, 6, 0.0)  # plain inference
    worker, (write, at_once) = worker_of(llm), WRITES[way]
    if at_once:
        with pytest.raises(SyncError, match=f"a weight sync of jetrl_patch's own, from {PATCHED}, found a call of"):
            write(worker, weights_of(second))
    else:
        write(worker, weights_of(second))
    for _ in range(2):
        with pytest.raises(SyncError, match="required a weight sync of jetrl_patch's own"):
            worker.execute_model(NewRequest)
    push(worker, stream(second, config, worker.jetrl_receiver.terms))
    llm.reset_prefix_cache()
    generate(llm, PROMPTS, 6, 0.0)


class NewRequest:
    """vLLM's next step, as far as the check reads it: an engine whose step fails is dead, and these tests go on with it."""

    scheduled_new_reqs = (None,)


@pytest.mark.parametrize("package", sorted(PACKAGES))
@pytest.mark.parametrize("precision", ["fp8-unified", "int8-rollout", "fp16", "bf16"])
def test_an_engine_that_another_trainer_builds(tmp_path: Path, package: str, precision: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    jetrl_patch.enable(precision=precision)
    config_of("qwen3").save_pretrained(tmp_path)
    module = ModuleType(f"{package}.somewhere.inside")
    exec("def build(args): return args.create_engine_config()", module.__dict__)
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True)
    if precision == "bf16":
        assert module.build(args).quant_config is None
        return
    with pytest.raises(ConfigError, match=rf"a trainer that jetrl_patch patches \({PATCHED}\), found {package}, "):
        module.build(args)
    assert args.quantization is None and args.dtype == "auto"


def test_vllms_own_weight_transfer() -> None:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    jetrl_patch.enable(precision="fp8-unified")
    args = EngineArgs(model=str(WORDS), weight_transfer_config=WeightTransferConfig(backend="ipc"))
    with pytest.raises(ConflictError, match=r"does not support vLLM's weight_transfer_config\. Turn it off\."):
        args.create_engine_config()


@pytest.mark.parametrize("precision", ["fp8-unified", "fp16", "bf16"])
def test_transformers_own_trainer(tmp_path: Path, precision: str) -> None:
    from transformers import Trainer, TrainingArguments

    class Distiller(Trainer):
        """A trainer of the user's own."""

    def trains() -> Any:
        settings = TrainingArguments(output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to="none", save_strategy="no")
        data = [{"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 2, 3])}] * 2
        model = AutoModelForCausalLM.from_config(config_of("qwen3", num_hidden_layers=1))
        return Distiller(model=model, args=settings, train_dataset=data).train()

    from transformers import AutoModelForCausalLM

    jetrl_patch.enable(precision=precision)
    if precision == "bf16":
        assert trains().global_step == 1
    else:
        with pytest.raises(ConfigError, match=r"found .*test_writes.*Distiller, which would go on in its own precision"):
            trains()
    jetrl_patch.disable()
    assert trains().global_step == 1


@pytest.mark.e2e
@needs_trl
def test_a_trainer_of_trl_that_is_not_patched(tmp_path: Path) -> None:
    """Before, it trained to the end: rollout in FP8, trainer as ever, weights written past the receiver."""
    done = run_python(tmp_path, str(Path(__file__).with_name("trl_script.py")), str(WORDS))
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "TRAINED" not in done.stdout
    named = "trl.trainer.distillation_trainer.DistillationTrainer"
    assert last.startswith(f"jetrl_patch.errors.ConfigError: {named} with precision='fp8-unified'")


# ---- A reward model's engine beside the rollout --------------------------------------------------

def scores(llm: Any) -> list[float]:
    return [output.outputs.probs[0] for output in llm.classify([{"prompt_token_ids": ids} for ids in PROMPTS], use_tqdm=False)]


@pytest.mark.e2e
@pytest.mark.parametrize(("runner", "align"), [("auto", "exact"), ("pooling", "linear")])
def test_an_engine_that_scores_beside_the_rollout(
    tmp_path: Path, checkpoint: Callable[..., str], engine: Callable[..., Any], runner: str, align: str
) -> None:
    from transformers import AutoModelForSequenceClassification

    from jetrl_patch.adapters.vllm.sample import generate

    config = config_of("qwen3", num_labels=2, architectures=["Qwen3ForSequenceClassification"])
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits.float().softmax(-1)[0, 0].item() for ids in PROMPTS]
    jetrl_patch.enable(precision="fp8-unified", align=align)
    settings = jetrl_patch.status().config
    rollout = engine(Job(model=checkpoint("qwen3"), config=settings))
    said = generate(rollout, PROMPTS, 6, 0.0)
    scorer = engine(Job(model=str(tmp_path), config=settings, engine=(("runner", runner),)))
    assert scorer.llm_engine.vllm_config.quant_config is None
    assert scores(scorer) == pytest.approx(expected, abs=0.02)
    again = generate(rollout, PROMPTS, 6, 0.0)
    assert [(one.response, one.log_probs) for one in again] == [(one.response, one.log_probs) for one in said]
