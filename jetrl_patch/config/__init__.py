"""The settings of a run: what they are, what can be wrong about them, how they travel as text."""

from jetrl_patch.config.fields import SETTINGS, from_text
from jetrl_patch.config.settings import Config

__all__ = ["SETTINGS", "Config", "from_text"]
