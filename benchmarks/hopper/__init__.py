"""``make hopper``: everything that needs a Hopper GPU. Each part is a module: ``pieces`` names what ``measure`` measures."""
