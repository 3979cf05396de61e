"""The INT8 flow of a rollout: one scale per row, exact integer products (torch only)."""
