"""The settings of a run: their table, their checks and their form as text."""

from jetrl_patch.config.environment import from_text
from jetrl_patch.config.fields import SETTINGS
from jetrl_patch.config.settings import Config

__all__ = ["SETTINGS", "Config", "from_text"]
