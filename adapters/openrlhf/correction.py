"""jetrl_patch's corrections in OpenRLHF: by its flags where it has the formula, otherwise by weights in ``PolicyLoss``.

``--algo.advantage.is_correction_level token`` clamps (``tis``) or drops (``mis``, ``icepop``) token by token. OpenRLHF has no
product over a sequence, and its ``seq`` drops by the geometric mean like ``geo-mis`` but weights the remaining tokens. So the
plugin computes ``seq-tis``, ``seq-mis``, ``geo-mis`` and ACR itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jetrl_patch import session
from jetrl_patch.config import Config
from jetrl_patch.config.corrections import AROUND_ONE, around_one, interval
from jetrl_patch.errors import ConfigError, JetrlError, explain
from jetrl_patch.patching.patch import replacement

#: correction -> OpenRLHF's mode at level "token"; the plugin computes the others
_MODES = {"tis": "clip", "mis": "mask", "icepop": "mask"}
_FIELDS = tuple(f"is_correction_{name}" for name in ("level", "mode", "gating", "threshold"))
_FLAG = "--algo.advantage.is_correction_"


def is_ours(config: Config) -> bool:
    """Whether the plugin computes the correction, inside ``PolicyLoss``."""
    return config.acr or (config.correction != "none" and config.correction not in _MODES)


def wanted(config: Config) -> dict[str, Any]:
    """Return the fields of ``args.algo.advantage`` to set; empty if they stay unchanged."""
    if config.correction == "none" or is_ours(config):
        return {}
    return {
        "is_correction_level": "token",
        "is_correction_mode": _MODES[config.correction],
        "is_correction_gating": "ratio",
        "is_correction_threshold": list(interval(config.correction, config.correction_bounds)),
    }


def in_use(advantage: Any, config: Config) -> tuple[str, tuple[float, float]] | None:
    """Return the name and interval of the run's correction, jetrl_patch's or OpenRLHF's.

    ``("none", (0, inf))`` without a correction; None if OpenRLHF's has no name here.
    """
    if config.correction != "none":
        return config.correction, interval(config.correction, config.correction_bounds)
    level = getattr(advantage, "is_correction_level", "off")
    if level == "off":
        return "none", (0.0, math.inf)
    low, high = _bounds(advantage)
    if level != "token" or advantage.is_correction_gating != "ratio":
        return None
    if advantage.is_correction_mode == "clip":
        return ("tis", (low, high)) if low == 0.0 else None
    return ("mis" if low == 0.0 else "icepop"), (low, high)


def _bounds(advantage: Any) -> tuple[float, float]:
    """Return the bounds of OpenRLHF's correction; the low one is 0 if there is only a cap."""
    *low, high = map(float, advantage.is_correction_threshold)
    return (low[0] if low else 0.0), high


def figures(advantage: Any, config: Config, log_ratio: Any, mask: Any) -> dict[str, float]:
    """Return metrics of the correction's effect on log-ratios [B, T]; empty without a named correction."""
    from jetrl_patch.measure.mismatch import of_run

    found = of_run(in_use(advantage, config), log_ratio, mask)
    return found.as_metrics() if found is not None else {}


def problems(args: Any, config: Config) -> Iterator[JetrlError]:
    """Yield an error for each argument of OpenRLHF that contradicts the configured correction."""
    advantage = args.algo.advantage
    if config.correction == "none":
        if advantage.is_correction_level != "off" and advantage.is_correction_gating == "ratio" and not config.mode.only_measures:
            bounds = _bounds(advantage)
            if not around_one(*bounds):
                what, fix = f"OpenRLHF's {_FLAG}threshold", "move the bounds, or leave it at its default"
                yield ConfigError(explain(what, required=AROUND_ONE, found=f"{bounds}", fix=fix))
        return
    ours = f"correction={config.correction!r}{', acr=True' if config.acr else ''}"
    theirs = {name.removeprefix("is_correction_"): getattr(advantage, name) for name in _FIELDS}
    asked = wanted(config)
    if theirs["level"] != "off" and any(getattr(advantage, name) != asked.get(name) for name in _FIELDS):
        required = f"{ours}, bounds {interval(config.correction, config.correction_bounds)}"
        found = ", ".join(f"{_FLAG}{name}={value!r}" for name, value in theirs.items())
        what = f"OpenRLHF's {_FLAG}level with jetrl_patch's correction"
        fix = f"set {_FLAG}level off, or drop jetrl_patch's correction"
        yield ConfigError(explain(what, required=required, found=found, fix=fix))
    if args.actor.policy_loss_type != "ppo":
        what, required = f"OpenRLHF's --actor.policy_loss_type with {ours}", "ppo (OpenRLHF's other losses apply no weights)"
        fix = "set it to ppo, or use correction='none'"
        yield ConfigError(explain(what, required=required, found=repr(args.actor.policy_loss_type), fix=fix))


@replacement
def policy_loss(
    original: Any,
    self: Any,
    log_probs: Any,
    old_log_probs: Any,
    advantages: Any,
    action_mask: Any = None,
    rollout_log_probs: Any = None,
    **sizes: Any,
) -> Any:
    """Wrap ``PolicyLoss.forward``: multiply its loss by the plugin's weights, token by token.

    With the level off, OpenRLHF's loss of a token is homogeneous in its advantage (with clip and dual clip), so
    w·loss(A) = loss(w·A) for every w ≥ 0. Everything else stays OpenRLHF's.
    """
    import torch

    from jetrl_patch.measure.corrections import correct

    config = session.active_config()
    log_ratio = (old_log_probs - rollout_log_probs).detach()
    mask = torch.ones_like(log_ratio) if action_mask is None else action_mask
    found = correct(config.correction, log_ratio, mask, config.correction_bounds)
    if config.acr:
        loss, clip_ratio, ppo_kl = _acr(self, log_probs, old_log_probs, advantages, mask, log_ratio, sizes, config)
    else:
        weighted = advantages * found.weights
        loss, clip_ratio, ppo_kl, _, _ = original(self, log_probs, old_log_probs, weighted, action_mask, **sizes)
    count = mask.bool().sum().clamp(min=1)
    outside = found.outside.sum() / count
    return loss, clip_ratio, ppo_kl, -log_ratio.masked_fill(~mask.bool(), 0.0).sum() / count, outside


def _acr(
    self: Any, log_probs: Any, old: Any, advantages: Any, mask: Any, log_ratio: Any, sizes: Any, config: Config
) -> tuple[Any, Any, Any]:
    """Compute OpenRLHF's loss with QuRL's clip: ``(loss, fraction of clipped tokens, KL)``, all scalars."""
    from openrlhf.models.loss import aggregate_loss
    from openrlhf.models.utils import masked_mean

    from jetrl_patch.measure.corrections import acr_loss, ratio

    _, cap = interval(config.correction, config.correction_bounds)
    rho = ratio(log_ratio, mask)
    losses, clipped = acr_loss(log_probs, old, advantages, rho, cap, self.clip_eps_low, self.clip_eps_high, self.dual_clip)
    loss = aggregate_loss(losses, mask, token_level_loss=self.token_level_loss, **sizes)
    kl = masked_mean((old - log_probs).detach(), mask, dim=None)
    return loss, masked_mean(clipped.float(), mask, dim=None), kl
