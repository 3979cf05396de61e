"""Single changes to decisive lines, each of which a test must notice: ``make mutations``."""
