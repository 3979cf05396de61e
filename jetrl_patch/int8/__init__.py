"""INT8 linear layers of a rollout: one scale per row, exact integer products (torch only)."""
