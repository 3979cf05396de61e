"""jetrl_patch's corrections in verl: set ``algorithm.rollout_correction``, and add only what verl lacks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jetrl_patch import session
from jetrl_patch.adapters.verl.yaml_settings import ACTOR, named, selector
from jetrl_patch.config import Config
from jetrl_patch.config.corrections import AROUND_ONE, CORRECTIONS, around_one, interval
from jetrl_patch.errors import ConfigError, JetrlError, explain
from jetrl_patch.patching.patch import replacement

if TYPE_CHECKING:
    from jetrl_patch.measure.mismatch import Applied

# ---- Metrics of a batch in which a correction drops every token: all weights and the effective sample size are 0 ----

_ZERO = ("mean", "std", "eff_sample_size", "seq_mean", "seq_std", "seq_max", "seq_min")


@replacement
def compute_is_metrics(original: Any, rollout_is_weights: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
    """Wrap verl's ``compute_is_metrics``, which divides by the sum of the squared weights."""
    if bool(rollout_is_weights.any()):
        return original(rollout_is_weights, *args, **kwargs)
    # any weights but 0 will do: only the metrics that do not depend on them are kept
    found: dict[str, float] = original(rollout_is_weights + 1.0, *args, **kwargs)
    zero = [f"rollout_is_{name}" for name in _ZERO]
    if kwargs.get("rollout_is") == "token":  # otherwise these two describe the plain ratios
        zero += ["rollout_is_max", "rollout_is_min"]
    return {**found, **dict.fromkeys(zero, 0.0), "rollout_is_seq_max_deviation": 1.0}


# ---- QuRL's adaptive clipping range (ACR), an entry of verl's registry of policy losses ----
# The loss needs the ratio ρ before truncation, but verl passes its losses only the truncated ``rollout_is_weights``. So verl
# computes and logs these (``rollout_corr/*``) as usual, and the plugin then replaces the tensor by ρ.

#: above e^20, the largest ratio after verl's clamp
_NO_CAP = 1e9


@replacement
def weights_and_mask(
    original: Any, old_log_prob: Any, rollout_log_prob: Any, response_mask: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wrap ``compute_rollout_correction_and_rejection_mask``: replace its weights by the plain ratio ρ. Both trainers call it.

    Mask and metrics stay verl's.
    """
    weights, mask, found = original(old_log_prob, rollout_log_prob, response_mask, *args, **kwargs)
    if weights is not None:
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

        log_ratio = old_log_prob - rollout_log_prob
        ratio, _ = compute_rollout_correction_weights(log_ratio, response_mask, "token", _NO_CAP)
        weights.batch["rollout_is_weights"] = ratio
    return weights, mask, found


@replacement
def add_to_batch(original: Any, batch: Any, rollout_corr_config: Any) -> Any:
    """Wrap ``compute_rollout_correction_and_add_to_batch`` for ``geo-mis``: weights of 0 instead of a shorter ``response_mask``.

    verl's trainers count the tokens of a loss by different masks: V0 by the one without the dropped tokens, V1 by that of the
    rollout. A weight has the same meaning in both, and is what the other corrections and OpenRLHF's loss use.
    """
    import torch

    mask = batch.batch["response_mask"]
    batch, found = original(batch, rollout_corr_config)
    if "rollout_is_weights" not in batch.batch:  # verl's trainer may hold a copy of the function that is wrapped already
        batch.batch["rollout_is_weights"] = batch.batch["response_mask"].to(torch.float32)
        batch.batch["response_mask"] = mask
    return batch, found


def policy_loss(
    old_log_prob: Any,
    log_prob: Any,
    advantages: Any,
    response_mask: Any,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Any = None,
) -> tuple[Any, dict[str, Any]]:
    """Compute verl's ``vanilla`` loss with ``measure.corrections.acr_loss`` instead of its clip. All tensors are [B, T].

    ``rollout_is_weights`` is ρ without truncation. Clip ranges, dual clip, aggregation and metrics are verl's.
    """
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.utils.torch_functional import masked_mean

    from jetrl_patch.measure.corrections import acr_loss

    settings = session.active_config()
    _, cap = interval(settings.correction, settings.correction_bounds)
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    dual = config.get("clip_ratio_c", 3.0)
    losses, clipped = acr_loss(log_prob, old_log_prob, advantages, rollout_is_weights, cap, low, high, dual)
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    change = (log_prob - old_log_prob).detach().clamp(-20.0, 20.0)
    at_dual = (advantages < 0) & (change.exp() > dual)
    return loss, {
        "actor/pg_clipfrac": masked_mean(clipped.float(), response_mask).item(),
        "actor/ppo_kl": masked_mean(-change, response_mask).item(),
        "actor/pg_clipfrac_lower": masked_mean(at_dual.float(), response_mask).item(),
    }


# ---- The settings under ``algorithm.rollout_correction`` ----
# verl's trainer loop computes the weights from ``old_log_probs`` and ``rollout_log_probs``
# (``verl/trainer/ppo/rollout_corr_helper.py``), and its policy losses multiply by them. verl clamps log-ratios to ±20, so a
# lower bound below e^-20 drops nothing.

CORRECTION = "algorithm.rollout_correction"
POLICY_LOSS = f"{ACTOR}.policy_loss"

#: name of the ACR loss in verl's registry
ACR_LOSS = "jetrl_acr"
#: below e^-20, the smallest ratio after verl's clamp
_KEEPS_ALL = 1e-9

#: correction -> verl's ``rollout_is``, and whether its threshold is an interval; ``geo-mis`` is a ``rollout_rs`` instead
_WEIGHTS = {
    "tis": ("token", False), "mis": ("token", True), "icepop": ("token", True),
    "seq-tis": ("sequence", False), "seq-mis": ("sequence", True),
}  # fmt: skip
_REJECTION = {"geo-mis": "seq_mean_k1"}

#: verl's losses that ignore the weights
_WITHOUT_WEIGHTS = ("geo_mean",)
#: advantage estimators that read the weights
_READ_WEIGHTS = ("optimal_token_baseline", "tir_optimal_token_baseline")


def _fields(config: Config) -> dict[str, Any]:
    """Return the fields of ``rollout_correction`` for the configured correction; empty for none."""
    if config.correction == "none":
        return {}
    low, high = interval(config.correction, config.correction_bounds)
    if config.correction in _REJECTION:
        # verl bounds -Δ, the log of μ/π, so the bounds are inverted
        return {
            "rollout_is": None,
            "rollout_rs": _REJECTION[config.correction],
            "rollout_rs_threshold": f"{1 / high!r}_{1 / max(low, _KEEPS_ALL)!r}",
        }
    level, is_interval = _WEIGHTS[config.correction]
    return {
        "rollout_is": level,
        "rollout_is_threshold": f"{max(low, _KEEPS_ALL)!r}_{high!r}" if is_interval else high,
        "rollout_rs": None,
    }


def wanted(verl_config: Any, config: Config) -> dict[str, Any]:
    """Return the settings that the correction, ACR and verl's bypass mode need: path -> value."""
    found = {f"{CORRECTION}.{name}": value for name, value in _fields(config).items()}
    if config.acr:
        found[f"{POLICY_LOSS}.loss_mode"] = ACR_LOSS
    if is_bypassed(verl_config):
        # verl sets these at the first batch (V0) or never (V1), when the workers already have their own copy
        found[f"{POLICY_LOSS}.loss_mode"] = "bypass_mode"
        found[f"{POLICY_LOSS}.rollout_correction"] = {**_section(verl_config), **_fields(config)}
    return found


def drops_tokens(config: Config) -> bool:
    """Whether the correction can set every weight to 0: its threshold is an interval."""
    return _WEIGHTS.get(config.correction, ("", False))[1]


def is_bypassed(verl_config: Any) -> bool:
    """Whether verl uses the rollout's log-probs as the old ones. Then no forward pass compares the two."""
    return bool(_section(verl_config).get("bypass_mode"))


def in_use(section: Mapping[str, Any] | None) -> tuple[str, tuple[float, float]] | None:
    """Return the name and interval of the correction in a ``rollout_correction`` section, the user's or the plugin's.

    ``("none", (0, inf))`` without a correction; None for a correction that the plugin has no name for.
    """
    section = section or {}
    level, reject = section.get("rollout_is"), section.get("rollout_rs")
    if not level and not reject:
        return "none", (0.0, math.inf)
    if section.get("rollout_is_batch_normalize") or (level and reject):
        return None
    if reject:
        name = next((ours for ours, theirs in _REJECTION.items() if theirs == reject), None)
        if name is None:
            return None
        text = str(section.get("rollout_rs_threshold"))
        low, high = _pair(text) or (1 / float(text), float(text))
        return name, (1 / high, 1 / low)
    threshold = str(section.get("rollout_is_threshold", 2.0))
    pair = _pair(threshold)
    if pair is None:
        return _named(level, False, (0.0, float(threshold)))
    open_below = pair[0] <= math.exp(-20)
    return _named(level, True, (0.0 if open_below else pair[0], pair[1]))


def _named(level: object, is_interval: bool, bounds: tuple[float, float]) -> tuple[str, tuple[float, float]] | None:
    """Name the correction by verl's weights. With a lower bound, prefer one that requires a lower bound."""
    names = [ours for ours, theirs in _WEIGHTS.items() if theirs == (str(level), is_interval)]
    if not names:
        return None
    strict = [name for name in names if CORRECTIONS[name].bounds == (2,)]
    return (strict[0] if strict and bounds[0] else names[0]), bounds


def figures(section: Mapping[str, Any] | None, log_ratio: Any, mask: Any) -> Applied | None:
    """Return the effect of a ``rollout_correction`` on log-ratios [B, T]; None if ``in_use`` finds none or has no name."""
    from jetrl_patch.measure.mismatch import of_run

    return of_run(in_use(section), log_ratio, mask)


def metrics(section: Mapping[str, Any] | None, log_ratio: Any, mask: Any) -> dict[str, float]:
    """Return ``figures`` as metrics; empty where it returns None."""
    found = figures(section, log_ratio, mask)
    return {} if found is None else found.as_metrics()


def problems(verl_config: Any, config: Config) -> Iterator[JetrlError]:
    """Yield an error for each setting of verl that contradicts the plugin's correction."""
    try:
        in_use(_section(verl_config))
    except (ValueError, ZeroDivisionError):
        given = {name: value for name, value in _section(verl_config).items() if name.endswith("_threshold")}
        found, fix = ", ".join(f"{name}={value!r}" for name, value in given.items()), "write 2.0, or 0.5_5.0 for an interval"
        yield ConfigError(explain(named(CORRECTION), required="thresholds above 0", found=found, fix=fix))
        return
    section, loss = _section(verl_config), str(selector(verl_config)(f"{POLICY_LOSS}.loss_mode") or "vanilla")
    if is_bypassed(verl_config):
        path = f"{CORRECTION}.bypass_mode"
        if loss not in ("vanilla", "bypass_mode"):
            yield _wrong(path, config, "loss_mode=vanilla, because verl's bypass mode has its own losses", repr(loss))
        if config.acr:
            yield _wrong(path, config, "false, because ACR changes the clip of a loss that bypass mode replaces", "true")
        if config.correction in _WEIGHTS and section.get("loss_type", "ppo_clip") != "reinforce":
            yield _wrong(path, config, "loss_type=reinforce, because ppo_clip applies no weights there", "ppo_clip")
    if config.correction == "none":
        name, bounds = in_use(section) or ("none", (0.0, math.inf))
        if not config.mode.only_measures and not around_one(*bounds):
            what, fix = f"{named(CORRECTION)} ({name})", "move rollout_is_threshold or rollout_rs_threshold"
            yield ConfigError(explain(what, required=AROUND_ONE, found=f"{bounds}", fix=fix))
        return
    if (section.get("rollout_is") or section.get("rollout_rs")) and not _same(section, config):
        names = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold", "rollout_is_batch_normalize")
        found = ", ".join(f"{name}={section[name]!r}" for name in names if section.get(name))
        what, fix = f"{named(CORRECTION)} with jetrl_patch's correction", "drop one of the two corrections"
        yield ConfigError(explain(what, required=_given(config), found=found, fix=fix))
    elif section.get("rollout_is_batch_normalize"):
        yield _wrong(f"{CORRECTION}.rollout_is_batch_normalize", config, "false (the formula does not normalize)", "true")
    if loss in _WITHOUT_WEIGHTS:
        yield _wrong(f"{POLICY_LOSS}.loss_mode", config, "a loss that applies weights", repr(loss))
    if config.acr and loss not in ("vanilla", ACR_LOSS):
        yield _wrong(f"{POLICY_LOSS}.loss_mode", config, "'vanilla', which ACR replaces", repr(loss))
    estimator = str(selector(verl_config)("algorithm.adv_estimator"))
    if config.acr and estimator in _READ_WEIGHTS:
        yield _wrong("algorithm.adv_estimator", config, "an estimator that does not read truncated weights", repr(estimator))


def _wrong(path: str, config: Config, required: str, found: str) -> ConfigError:
    what = f"{named(path)} with {_given(config)}"
    return ConfigError(explain(what, required=required, found=found, fix="change the setting, or the correction"))


def _given(config: Config) -> str:
    bounds = config.correction_bounds
    given = "" if bounds is None else f", correction_bounds={bounds}"
    return f"correction={config.correction!r}{given}{', acr=True' if config.acr else ''}"


def _same(section: Mapping[str, Any], config: Config) -> bool:
    theirs, ours = in_use(section), in_use(_fields(config))
    if theirs is None or ours is None or theirs[0] != ours[0]:
        return False
    return all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(theirs[1], ours[1]))


def _pair(text: str) -> tuple[float, float] | None:
    low, between, high = text.partition("_")
    return (float(low), float(high)) if between else None


def _section(verl_config: Any) -> Mapping[str, Any]:
    from omegaconf import OmegaConf

    found = selector(verl_config)(CORRECTION)
    plain = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
    return plain or {}
