"""FlashAttention-3 as exact attention: one configuration on both sides, used only if a trial finds its rows equal."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import sys
from pathlib import Path

import pytest
import torch

from jetrl_patch.config import Config
from jetrl_patch.errors import AuditError, ConfigError
from jetrl_patch.exact import dispatch, flash3, ops, trial
from jetrl_patch.sync.protocol import Terms, require_same_terms

from ..fp8.thresholds import SQNR_ATTENTION, SQNR_ATTENTION_GRADIENT, sqnr
from .flash3_double import FlashAttention3

LENGTHS = (1, 33, 130, 300, 8)
HEADS = (4, 2)
CPU = torch.device("cpu")


@pytest.fixture
def library(monkeypatch):
    """The double in place of the library, for heads of width 64 and 128 on this CPU."""
    double = FlashAttention3()
    monkeypatch.setattr(flash3, "find", lambda: (double.flash_attn_varlen_func, ""))
    monkeypatch.setattr(dispatch, "attentions", {("cpu", width): flash3.FLASH3 for width in (64, 128)})
    return double


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("page", [16, 32, 128])
def test_rows_are_equal_in_training_prefill_and_decoding(library, width, page):
    with torch.device("meta"):  # as a trainer may build its model
        verdict = trial.compare_attention(HEADS, width, "cpu", page, LENGTHS)
    assert verdict.ok, verdict.found
    assert set(library.calls) == {(128, 1)}


def test_a_longest_query_as_it_is_would_change_the_tiles_of_decoding(library, monkeypatch):
    monkeypatch.setattr(flash3, "LONGEST", 1)
    verdict = trial.compare_attention(HEADS, 64, "cpu", lengths=(300,))
    assert "differ between a decode step" in verdict.found
    assert [keys for keys, _ in library.calls] == [128, 160]


def test_a_neighbour_that_grows_changes_no_tile(library, monkeypatch):
    """vllm#51902: a decode step batched with a prefill of 9 tokens, and of 10. Sizes: 14 heads on 2, of width 64, pages of 16."""
    g = torch.Generator().manual_seed(4)
    k, v = (torch.randn(60, 16, 2, 64, generator=g).to(torch.bfloat16) for _ in range(2))
    q = torch.randn(11, 14, 64, generator=g).to(torch.bfloat16)
    table, context = torch.arange(60, dtype=torch.int32).view(2, 30), 450

    def decoding(beside: int) -> torch.Tensor:
        lengths = torch.tensor([context, beside], dtype=torch.int32)
        starts = torch.tensor([0, 1, 1 + beside], dtype=torch.int32)
        return flash3.attention_paged(q[: 1 + beside], k, v, table, lengths, starts, 0.125)[0][0]

    assert torch.equal(decoding(8), decoding(9)) and torch.equal(decoding(9), decoding(10))
    assert library.calls == [(128, 1)] * 4
    plain = library.flash_attn_varlen_func
    as_it_is = lambda *a, **o: plain(*a, **{**o, "max_seqlen_q": int(o["cu_seqlens_q"].diff().max())})  # noqa: E731
    monkeypatch.setattr(flash3, "find", lambda: (as_it_is, ""))
    assert not torch.equal(decoding(9), decoding(10)), "the double no longer has the fault"
    assert library.calls[4:] == [(192, 1), (128, 1)]


def test_a_split_of_the_keys_would_change_a_row(library, monkeypatch):
    plain = library.flash_attn_varlen_func
    monkeypatch.setattr(flash3, "find", lambda: (lambda *a, **k: plain(*a, **{**k, "num_splits": 0}), ""))
    verdict = trial.compare_attention(HEADS, 128, "cpu", lengths=(700, 1))
    assert not verdict.ok and min(parts for _, parts in library.calls) > 1


@pytest.mark.parametrize("width", [64, 128])
def test_values_and_gradients_against_fp64(library, width):
    g = torch.Generator().manual_seed(3)
    ends = [0, *itertools.accumulate(LENGTHS)]
    q, k, v, grad = (
        torch.randn(ends[-1], heads, width, generator=g).to(torch.bfloat16).requires_grad_(i < 3)
        for i, heads in enumerate((*HEADS, HEADS[1], HEADS[0]))
    )
    out = ops.attention_varlen(q, k, v, torch.tensor(ends, dtype=torch.int32), width**-0.5)
    out.backward(grad)
    assert library.calls
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = []
    for a, b in itertools.pairwise(ends):
        Q, K, V = (t[a:b].transpose(0, 1) for t in (wide[0], *(t.repeat_interleave(2, 1) for t in wide[1:])))
        hidden = torch.ones(b - a, b - a, dtype=torch.bool).triu(1)
        expected.append(((Q @ K.mT * width**-0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ V).transpose(0, 1))
    torch.cat(expected).backward(grad.double())
    assert sqnr(out.detach(), torch.cat(expected).detach()) > SQNR_ATTENTION
    for ours, theirs in zip((q, k, v), wide):
        assert sqnr(ours.grad, theirs.grad) > SQNR_ATTENTION_GRADIENT


@pytest.mark.parametrize("lengths", [(1,), (16,), (17, 0, 15, 1, 0), (0, 40), (5,) * 9])
def test_pages_hold_each_sequence_from_the_start_of_a_page(lengths):
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    k, v = torch.randn(2, sum(lengths), 2, 64).to(torch.bfloat16)
    k_cache, v_cache, table = flash3.pages(k, v, cu)
    assert k_cache.shape == v_cache.shape == (sum(lengths) // 16 + len(lengths), 16, 2, 64) and table.dtype == torch.int32
    for r, (a, b) in enumerate(itertools.pairwise(cu.tolist())):
        for cache, source in ((k_cache, k), (v_cache, v)):
            held = cache[table[r].long()].flatten(0, 1)
            assert torch.equal(held[: b - a], source[a:b])
    assert 0 <= int(table.min()) <= int(table.max()) < len(k_cache)


@pytest.fixture
def gpu(monkeypatch, library):
    """A process on a GPU that has chosen nothing, whose trial runs on this CPU."""
    chosen: dict[tuple[str, int], str] = {}
    monkeypatch.setattr(dispatch, "attentions", chosen)
    monkeypatch.setattr(dispatch, "_chosen", {"cuda": "triton", "cpu": "native"})
    monkeypatch.setattr(trial, "_attention_tried", {})
    compare, trials = trial.compare_attention, []

    def here(heads, width, device, page, large):
        assert large == trial.LARGE
        trials.append((heads, width, page))
        chosen["cpu", width] = chosen[device.type, width]  # what is tried there
        try:
            return compare(heads, width, "cpu", page, (1, 33, 130))
        finally:
            del chosen["cpu", width]

    monkeypatch.setattr(trial, "compare_attention", here)
    return trials


CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("asked", ["auto", "flash3"])
def test_equal_rows_are_taken_and_tried_once(gpu, asked):
    assert trial.choose_attention(asked, HEADS, 64, CUDA, 32) == "flash3"
    assert trial.choose_attention(asked, HEADS, 64, CUDA, 32) == "flash3"
    assert gpu == [(HEADS, 64, 32)] and dispatch.chosen_attention("cuda") == "flash3"
    assert trial.choose_attention("triton", HEADS, 64, CUDA, 32) == dispatch.chosen_attention("cuda") == ""


def broken(kernel):
    def differs(q, *args, **kwargs):
        out, lse = kernel(q, *args, **kwargs)
        return (out * 1.01 if q.shape[0] == 3 else out), lse

    return differs


def crashes(kernel):
    def fails(*args, **kwargs):
        raise RuntimeError("CUDA error: no kernel image")

    return fails


REASONS = {
    "absent": (lambda kernel: None, "no such module"),
    "unequal": (broken, "differ between a decode step over a paged cache and a packed batch"),
    "fails": (crashes, "RuntimeError: CUDA error: no kernel image"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_otherwise_the_projects_kernel_serves_or_the_name_is_refused(gpu, library, monkeypatch, caplog, reason):
    make, words = REASONS[reason]
    monkeypatch.setattr(flash3, "find", lambda: (make(library.flash_attn_varlen_func), "no such module"))
    with caplog.at_level("INFO"):
        assert trial.choose_attention("auto", HEADS, 64, CUDA) == ""
    assert words in caplog.text and "Triton kernel" in caplog.text
    assert dispatch.chosen_attention("cuda") == ""
    with pytest.raises(ConfigError, match=rf"exact_attention='flash3': required .*{words}.* Use exact_attention='auto'"):
        trial.choose_attention("flash3", HEADS, 64, CUDA)
    assert dispatch.chosen_attention("cuda") == "" and len(gpu) == (reason != "absent")  # what is absent is not tried


def test_who_asks_for_another_gets_it_without_a_trial(gpu):
    assert trial.choose_attention("triton", HEADS, 64, CUDA) == ""
    assert trial.choose_attention("flash3", HEADS, 64, CPU) == ""
    dispatch._chosen["cuda"] = "torch"
    with pytest.raises(ConfigError, match=r"found the torch formulas"):
        trial.choose_attention("flash3", HEADS, 64, CUDA)
    assert not gpu


def test_what_is_missing_here_is_said():
    kernel, missing = flash3.find.__wrapped__()
    if not torch.cuda.is_available():
        assert kernel is None and "sees no CUDA device" in missing


def test_an_older_or_broken_library_is_not_called(monkeypatch):
    monkeypatch.setattr(flash3, "check_hopper", lambda: (True, "NVIDIA H200"))
    double = FlashAttention3()
    monkeypatch.setitem(sys.modules, flash3.MODULE, double)
    assert flash3.find.__wrapped__() == (double.flash_attn_varlen_func, "")
    double.flash_attn_varlen_func = lambda q, k, v, fa_version: None
    assert "has no block_table, causal" in flash3.find.__wrapped__()[1]
    double.is_fa_version_supported = lambda version: False
    double.fa_version_unsupported_reason = lambda version: "no _vllm_fa3_C"
    assert flash3.find.__wrapped__() == (None, "no FlashAttention-3: no _vllm_fa3_C")
    monkeypatch.setitem(sys.modules, flash3.MODULE, None)
    assert flash3.find.__wrapped__()[1].startswith("vllm.vllm_flash_attn cannot be imported (ModuleNotFoundError")


def test_vllms_own_source_takes_the_arguments_and_hands_them_on():
    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    tree = ast.parse((folder / "vllm_flash_attn" / "flash_attn_interface.py").read_text())
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "flash_attn_varlen_func")
    names = {a.arg for a in (*function.args.args, *function.args.kwonlyargs)}
    assert names >= flash3.ARGUMENTS
    call = next(n for n in ast.walk(function) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("_vllm_fa3_C.fwd"))
    handed = {n.id for n in ast.walk(call) if isinstance(n, ast.Name)}
    assert handed >= flash3.ARGUMENTS - {"return_softmax_lse", "fa_version"}
    exported = (folder / "vllm_flash_attn" / "__init__.py").read_text()
    assert all(n in exported for n in ("flash_attn_varlen_func", "is_fa_version_supported", "fa_version_unsupported_reason"))


def test_sides_that_chose_differently_do_not_sync():
    trainer, rollout = (Terms.of(Config(), "triton", attention=name) for name in ("", "flash3"))
    with pytest.raises(AuditError, match=r"exact attention: required flash3, as in the rollout, found .*JETRL_EXACT"):
        require_same_terms(trainer, rollout, set(), set())
