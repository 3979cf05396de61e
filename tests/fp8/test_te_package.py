"""TransformerEngine's own recipes, layers and tensors, from its Python package without its libraries."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.forks import facts

SCRIPT = Path(__file__).with_name("te_script.py")
#: what `make megatron` installs
TE = Path(sys.prefix) / "te"
#: what the script changes of a recipe that is right otherwise -> what the error names
CHANGED = {"hybrid": "fp8_format=HYBRID", "rows": "w_block_scaling_dim=1", "override": "backward_override=high_precision"}

pytestmark = pytest.mark.skipif(not TE.is_dir(), reason=f"needs {TE}, which `make megatron` makes")


@pytest.mark.parametrize(("scale_format", "other", "fp32_scales"), [("pow2", "fp32", 0), ("fp32", "pow2", 1)])
def test_its_own_classes(scale_format, other, fp32_scales):
    variables = {"NVTE_PROJECT_BUILDING": "1", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": str(fp32_scales), "PYTHONPATH": str(TE)}
    found = facts(SCRIPT, 0, scale_format, other, environ=variables)
    accepted = [name for name, error in found["recipes"].items() if error is None]
    assert accepted == ["Float8BlockScaling"] and len(found["recipes"]) >= 9
    for name in ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling", "CustomRecipe"):
        assert f"found {name}." in found["recipes"][name]
    for name, differs in CHANGED.items():
        assert f"found Float8BlockScaling with {differs}." in found["recipes"][name]
    error = found["other format"]
    assert f"fp8_quant_fwd_weight.power_2_scale={not fp32_scales}" in error
    assert f"set NVTE_FP8_BLOCK_SCALING_FP32_SCALES={1 - fp32_scales}" in error
    linears = {name for name, is_linear in found["linears"].items() if is_linear}
    assert linears == {"Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"} and len(found["linears"]) == 7
    assert found["signature"] and found["tensor"] and found["bytes"] and found["scales"] and found["values"]
    assert "required row-wise data, found only column-wise data" in found["turned"]
