"""The settings of a run: their table, their checks and their text form."""

from jetrl_patch.config.fields import SETTINGS, from_text
from jetrl_patch.config.settings import Config

__all__ = ["SETTINGS", "Config", "from_text"]
