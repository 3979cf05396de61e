"""The checkpoint engine for rollouts in other processes: every tensor arrives whole at every rollout process."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

base = pytest.importorskip("verl.checkpoint_engine.base")

from jetrl_patch.adapters.cpu.platform import make_engine  # noqa: E402

BUCKET = 1 << 12


def tensors() -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [
        ("manifest", torch.randint(0, 255, (48,), dtype=torch.uint8)),
        ("weight", torch.randn(24, 40).to(torch.float8_e4m3fn)),
        ("scale", torch.rand(3, 5)),
        ("larger than a bucket", torch.randn(77, 50).bfloat16()),
        ("fills a bucket", torch.randn(BUCKET // 4)),
        ("commit", torch.randint(0, 255, (16,), dtype=torch.uint8)),
    ]


def exchange(actors: int, rollouts: int, streams: list[list[tuple[str, torch.Tensor]]], monkeypatch) -> list[list]:
    """Sync once for each stream, with threads as processes. Returns what each rollout received each time."""
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    Engine = make_engine(base, 30.0)
    engines = [Engine(bucket_size=BUCKET, is_master=rank == 0) for rank in range(actors + rollouts)]
    received: list[list] = [[] for _ in range(rollouts)]
    for stream in streams:
        metadata = [engine.prepare() for engine in engines]
        kwargs = Engine.build_topology(actors, rollouts, metadata)
        errors = []

        def work(number: int, stream=stream, kwargs=kwargs, errors=errors) -> None:
            group, rank = (kwargs[0], number) if number < actors else (kwargs[1], number - actors)
            engine = engines[number]

            async def run() -> None:
                if number < actors:
                    await engine.send_weights(iter(stream))
                else:
                    received[rank].append([(n, t.clone()) async for n, t in engine.receive_weights()])

            try:
                engine.init_process_group(**{name: values[rank] for name, values in group.items()})
                asyncio.run(run())
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(engines))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors and not any(thread.is_alive() for thread in threads)
        for engine in engines:
            engine.finalize()
    return received


@pytest.mark.parametrize(("actors", "rollouts"), [(1, 1), (2, 3)])
def test_every_tensor_arrives_whole_in_each_sync(actors, rollouts, monkeypatch):
    streams = [tensors(), [], tensors()[:2]]
    for found in exchange(actors, rollouts, streams, monkeypatch):
        for got, sent in zip(found, streams, strict=True):
            assert [name for name, _ in got] == [name for name, _ in sent]
            for (_, a), (_, b) in zip(got, sent, strict=True):
                assert a.dtype == b.dtype and a.shape == b.shape
                assert torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
