"""The trainer's log-probs in exact mode: EOS is banned at the first token of a response, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from jetrl_patch import session
from jetrl_patch.adapters.openrlhf import logprob, state
from jetrl_patch.adapters.openrlhf.patches import PATCHES
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError
from jetrl_patch.exact import logprob as log_softmax
from jetrl_patch.exact.ops import head_linear_fp32, token_log_probs
from tests.patches import applied

V, B, T, A = 12, 3, 7, 6  # actions: OpenRLHF's masks have T - 1 columns


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    monkeypatch.setattr(session, "is_active", lambda: True)
    monkeypatch.setattr(session, "active_config", lambda: Config(precision="fp8-unified").resolved())
    monkeypatch.setattr(session, "active_with", lambda wanted: wanted(session.active_config()))
    monkeypatch.setattr(state.WORKER, "stop_tokens", (1, 3))


class Actor:
    """What ``Actor.forward`` does around the two replaced functions."""

    packing_samples = False

    def __init__(self, logits, packed=False, temperature=1.0):
        self.logits, self.packing_samples, self.temperature = logits, packed, temperature
        state.WORKER.sources[self] = object()

    def forward(self, sequences, action_mask=None, attention_mask=None, return_entropy=False, **_):
        logits, labels = self.logits, torch.roll(sequences, -1, 1)
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        self.entropy = patched_entropy(logits) if return_entropy else None
        if self.packing_samples:
            places = attention_mask.flatten().bool()
            packed = patched_log_probs(logits.flatten(0, 1)[places].unsqueeze(0), labels.flatten()[places].unsqueeze(0))
            found = torch.zeros(sequences.numel()).masked_scatter(places, packed).view(sequences.shape)
        else:
            found = patched_log_probs(logits, labels)
        return found[:, :-1][:, -action_mask.shape[1] :] * action_mask.float()


def original(logits, labels, temperature=1.0):
    raise AssertionError("the original is not for exact mode")


patched_log_probs = logprob.log_probs_from_logits(original)


def entropy(logits):
    return torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1)


patched_entropy = logprob.compute_entropy(entropy)


def batch(seed=0):
    """Two turns in the first sample, one in the second, a response of one token in the third; right padding."""
    torch.manual_seed(seed)
    sequences = torch.randint(0, V, (B, T))
    attention = torch.tensor([[1] * 7, [1] * 6 + [0], [1] * 4 + [0] * 3])
    actions = torch.tensor([[0, 1, 1, 0, 1, 1], [0, 0, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0]])
    return sequences, attention, actions, torch.randn(B, T, V) * 3


class OnCuda(TorchFunctionMode):
    """CUDA's division: by a number it is a multiplication by the number's reciprocal, by a tensor it is none."""

    DIVISIONS = (torch.Tensor.div_, torch.Tensor.div, torch.Tensor.__truediv__, torch.Tensor.__itruediv__)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.DIVISIONS and not isinstance(args[1], torch.Tensor):
            return (torch.Tensor.mul_ if func is torch.Tensor.div_ else torch.mul)(args[0], 1 / torch.tensor(args[1]))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def cuda(monkeypatch):
    """What differs on a GPU between a division by a number and by a tensor."""
    monkeypatch.setattr(log_softmax, "divisor", lambda temperature, like: torch.tensor(temperature))
    with OnCuda():
        yield


def by_hand(sequences, actions, logits):
    """Compute one token at a time, directly from the definition."""
    found = torch.zeros(actions.shape)
    for b in range(B):
        for a in range(A):
            if actions[b, a]:
                row = logits[b, a].clone()
                if a == 0 or not actions[b, a - 1]:
                    row[[1, 3]] = -torch.inf
                found[b, a] = torch.log_softmax(row.float(), -1)[sequences[b, a + 1]]
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_the_end_is_banned_at_the_first_token_of_each_turn(packed, seed):
    sequences, attention, actions, logits = batch(seed)
    first = torch.zeros_like(actions).bool()
    first[0, [1, 4]] = first[1, 2] = first[2, 2] = True
    sequences[:, 1:][first] = 5  # vLLM samples no EOS there
    forward = logprob.actor_forward(Actor.forward)
    found = forward(Actor(logits, packed), sequences, actions, attention)
    assert torch.equal(found, by_hand(sequences, actions, logits))
    plain = token_log_probs(logits, torch.roll(sequences, -1, 1))[:, :-1] * actions
    assert bool((found[first] > plain[first]).all()) and torch.equal(found[~first], plain[~first])


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("temperature", [0.9, 1.3])
def test_the_temperature_divides_as_in_vllm(packed, temperature):
    """Bit-equal to the division by a tensor, in log-probs and entropies, and the actor keeps its temperature."""
    sequences, attention, actions, logits = batch()
    sequences[:, 1:][logprob.first_tokens(actions, T)[:, :-1]] = 5
    divided = logits / torch.tensor(temperature)
    expected = by_hand(sequences, actions, divided)
    assert not torch.equal(by_hand(sequences, actions, logits / temperature), expected)  # on CUDA they differ
    forward = logprob.actor_forward(Actor.forward)
    for asked in (False, True):
        actor = Actor(logits.clone(), packed, temperature)
        assert torch.equal(forward(actor, sequences, actions, attention, return_entropy=asked), expected)
        assert actor.temperature == temperature
    assert torch.equal(actor.entropy, entropy(divided))


@pytest.mark.parametrize("entropy", [False, True])
def test_logits_that_are_a_view_can_have_a_temperature(entropy):
    """With ``head_dtype="float32"`` they are one, of an autograd function: it may not be modified in place."""
    sequences, attention, actions, _ = batch()
    hidden, weight = torch.randn(B, T, 8).bfloat16().requires_grad_(), torch.randn(V, 8).bfloat16().requires_grad_()
    actor = Actor(head_linear_fp32(hidden, weight), temperature=0.7)
    logprob.actor_forward(Actor.forward)(actor, sequences, actions, attention, return_entropy=entropy).sum().backward()
    assert hidden.grad.abs().sum() > 0 and weight.grad.abs().sum() > 0


def test_gradients_flow_through_both_kinds_of_rows():
    sequences, attention, actions, logits = batch()
    logits.requires_grad_()
    logprob.actor_forward(Actor.forward)(Actor(logits), sequences, actions, attention).sum().backward()
    gradient = logits.grad[0]
    assert gradient[1].abs().sum() > 0 and gradient[1, [1, 3]].abs().sum() == 0  # first token: banned logits get no gradient
    assert gradient[2, [1, 3]].abs().min() > 0


def test_turns_that_the_mask_would_join_are_refused(monkeypatch):
    """vLLM bans the end at the first token of each request; a mask that is one run shows one of them."""
    process = applied(logprob.process_response, PATCHES, lambda self, response, **kwargs: response)
    apart, joined = ({"action_ranges": [(1, 3), (start, 6), (7, 9)]} for start in (4, 3))
    assert process(None, apart, max_len=9) is apart
    with pytest.raises(ConfigError, match=r"a turn that begins at token 3, where the previous one ends\. Return a non-empty"):
        process(None, joined, max_len=9)
    monkeypatch.setattr(session, "active_config", lambda: Config(precision="fp8-unified", align="linear").resolved())
    assert process(None, joined) is joined


def test_first_tokens():
    assert logprob.first_tokens(torch.tensor([[0, 1, 1, 0, 1]]), 6).tolist() == [
        [False, True, False, False, True, False]
    ]
    assert logprob.first_tokens(torch.tensor([[1, 1]]), 5).tolist() == [[False, False, True, False, False]]


def test_outside_of_exact_mode_the_original_computes(monkeypatch):
    monkeypatch.setattr(session, "active_config", lambda: Config(precision="fp8-unified", align="linear").resolved())
    calls = []
    applied(logprob.log_probs_from_logits, PATCHES, lambda *args: calls.append(args))(1, 2)
    assert calls == [(1, 2)]
    logprob.check_sampling(7)


def test_a_min_tokens_that_cannot_be_reproduced_is_refused():
    logprob.check_sampling(1)
    with pytest.raises(ConfigError, match="min_tokens in exact mode: required at most 1"):
        logprob.check_sampling(2)
