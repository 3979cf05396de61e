"""The settings of a run: what they are, what can be wrong about them, how they travel as text."""

from jetrl_patch.config.settings import JOINT, Config
from jetrl_patch.config.text import from_text

__all__ = ["JOINT", "Config", "from_text"]
