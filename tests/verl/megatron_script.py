"""verl's own Megatron engine class, patched, with a stand-in for Megatron; run in a separate process.

Real: verl's ``transformer_impl.MegatronEngine``, ``enable()`` and its patches, the sync's stream. Stand-ins: every module
of Megatron, the modules of verl that need it, Megatron-Bridge's export (like the real one, it yields a Hugging Face model's
BF16 tensors) and TransformerEngine (``tests/fp8/te_fakes.py``).
Prints ``FACTS {...}``, or ``ERROR <type>: <text>``. Arguments: scale format, what is wrong (or "nothing").
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types

from tests.fp8 import te_fakes as te

STOOD_IN = ("verl.models.mcore", "verl.utils.megatron", "verl.utils.checkpoint.megatron", "verl.utils.dynamic_cp")


class Stub(types.ModuleType):
    """A module in which every name is a class that accepts any arguments."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *a, **k: None})
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "megatron" or name.startswith(STOOD_IN):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        if module.__name__ == "megatron.core.package_info":
            module.__version__ = "0.16.0"
        if module.__name__ == "verl.utils.checkpoint.megatron_checkpoint_manager":
            methods = dict.fromkeys(("save_checkpoint", "load_checkpoint"), lambda *a, **k: None)
            module.MegatronCheckpointManager = type("MegatronCheckpointManager", (), methods)
        if module.__name__ == "verl.utils.megatron.optimizer":
            module.is_muon_layer_wise_config = lambda config: False
        if module.__name__ == "verl.utils.megatron_utils":
            module.load_megatron_model_to_gpu = lambda *a, **k: None


class Setter:
    """The one method of pytest's monkeypatch that ``te_fakes.install`` uses."""

    def setitem(self, mapping, key, value):
        mapping[key] = value


class Block(te.nn.Module):
    """A transformer block of Megatron: four TransformerEngine layers and the norms outside them."""

    def __init__(self):
        super().__init__()
        self.self_attention, self.mlp = te.nn.Module(), te.nn.Module()
        self.self_attention.linear_qkv = te.TELayerNormColumnParallelLinear(128, 128)
        self.self_attention.linear_proj = te.TERowParallelLinear(128, 128)
        self.self_attention.q_layernorm = te.nn.LayerNorm(128)
        self.mlp.linear_fc1 = te.TELayerNormColumnParallelLinear(128, 128)
        self.mlp.linear_fc2 = te.TERowParallelLinear(128, 128)


def megatron_model(layers):
    model = te.nn.Module()
    model.module = te.nn.Module()  # as DDP wraps it
    model.module.decoder = te.nn.Module()
    model.module.decoder.layers = te.nn.ModuleList(Block() for _ in range(layers))
    model.module.output_layer = te.nn.Linear(128, 8)
    return model


class Bridge:
    """Megatron-Bridge: export weights under their Hugging Face names, tied ones too if the checkpoint has them."""

    def __init__(self, hf):
        self.hf = hf

    def load_hf_weights(self, module, path, allowed_mismatched_params):
        pass

    def get_conversion_tasks(self, module):
        return ["task"]

    def export_hf_weights(self, module, conversion_tasks):
        assert conversion_tasks == ["task"]
        yield from ((name, tensor.detach().clone()) for name, tensor in self.hf.state_dict().items())


def main(scale_format, wrong):
    import torch

    sys.meta_path.insert(0, Finder())
    importlib.import_module("megatron.core")  # appears installed to the guards
    import jetrl_patch
    from jetrl_patch.adapters.cpu import megatron
    from tests.models import build

    megatron.HOOK = dataclasses.replace(megatron.HOOK, apply=lambda module, journal: None)  # there is no Megatron to prepare
    jetrl_patch.enable(
        precision="fp8-unified", align="linear", scale_format=scale_format, platform="cpu",
        backend="te",
    )  # fmt: skip
    recipe = te.Float8BlockScaling(os.environ.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") != "1")
    sys.modules["megatron.core.fp8_utils"] = types.ModuleType("megatron.core.fp8_utils")
    sys.modules["megatron.core.fp8_utils"].get_fp8_recipe = lambda config: te.MXFP8BlockScaling() if wrong == "recipe" else recipe

    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    te.install(Setter())
    hf = build("qwen3", head_dim=64 if wrong == "heads" else 128, tie_word_embeddings=wrong == "tied")
    blocks = {"stages": (1, 1), "short": (2,)}.get(wrong, (hf.config.num_hidden_layers,))
    chunks = [megatron_model(n) for n in blocks]
    model = chunks[0]
    if wrong == "plain":
        model.module.decoder.layers[1].mlp.linear_fc2 = te.nn.Linear(128, 128)
    if wrong == "sharded":  # Megatron-FSDP's FP32 masters, whose values BF16 does not have
        for parameter in hf.float().parameters():
            parameter.data += 1e-3 * torch.randn(parameter.shape) * parameter.data
    if wrong == "nan":
        hf.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("nan")
    tf_config = types.SimpleNamespace(
        fp8=None if wrong == "settings" else "e4m3", fp8_recipe=types.SimpleNamespace(value="blockwise"),
        fp8_param=False, first_last_layers_bf16=False,
    )  # fmt: skip
    sys.modules["verl.utils.megatron_utils"].make_megatron_module = lambda **k: (chunks, tf_config)
    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)

    class Settings(types.SimpleNamespace):
        def get(self, name, default=None):
            return getattr(self, name, default)

    engine = MegatronEngine.__new__(MegatronEngine)
    vars(engine).update(
        model_config=Settings(
            model_type="value_model" if wrong == "critic" else "language_model", hf_config=hf.config, local_path="-"
        ),
        engine_config=Settings(
            tensor_model_parallel_size=1, context_parallel_size=1, expert_model_parallel_size=1, expert_tensor_parallel_size=None,
            sequence_parallel=True, vanilla_mbridge=False, pipeline_model_parallel_size=len(blocks), forward_only=False,
            use_distributed_optimizer=True, use_megatron_fsdp=wrong == "sharded", override_ddp_config={},
            override_mcore_model_config={},
            use_dist_checkpointing=False,
        ),
        optimizer_config=None, is_value_model=wrong == "critic", tf_config=None, provider=None, peft_cls=None,
        bridge=Bridge(hf), vanilla_bridge=False, enable_routing_replay=False, _hf_export_tasks=None, _qat_enabled=False,
    )  # fmt: skip
    before = {name: type(m) for name, m in model.named_modules()}
    engine.module = engine._build_megatron_module()
    if wrong == "critic":
        print("FACTS", json.dumps({"converted": hasattr(engine, "_jetrl")}))
        return
    stream, peft = engine.get_per_tensor_param()
    sent = dict(stream)
    from jetrl_patch.adapters.verl.state import WORKER
    from jetrl_patch.sync.protocol import Manifest

    manifest = Manifest.decode(sent["jetrl.manifest"])
    weights = hf.bfloat16().state_dict()
    equal = 0
    for layer in manifest.layers:
        theirs = te.quantized(weights[f"{layer}.weight"].contiguous(), scale_format == "pow2").parts
        q, s = sent[f"{layer}.weight"], sent[f"{layer}.weight_scale_inv"]
        equal += torch.equal(q.view(torch.uint8), theirs["rowwise_data"]) and torch.equal(
            s, theirs["rowwise_scale_inv"][:, : s.shape[1]]
        )
    rest = set(manifest.tensors) - {f"{layer}.weight" for layer in manifest.layers}
    facts = {
        "peft": peft,
        "terms": vars(manifest.terms),
        "layers": len(manifest.layers),
        "equal": equal,
        "rest": all(torch.equal(sent[name], weights[name]) for name in rest),
        "lm_head": "lm_head.weight" in sent,
        "complete": set(manifest.expected()) == set(sent) - {"jetrl.manifest", "jetrl.commit"},
        "untouched": before == {name: type(m) for name, m in model.named_modules()},
        "stats": [WORKER.stats.layers, WORKER.stats.quantized < WORKER.stats.quantized_as_bf16],
        "scales": os.environ["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"],
        "backend": jetrl_patch.status().backend,
    }
    jetrl_patch.disable()
    facts["scales_after"] = os.environ.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES")
    print("FACTS", json.dumps(facts))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception as error:
        print(f"ERROR {type(error).__name__}: {error}")
        if os.environ.get("SHOW"):
            raise
