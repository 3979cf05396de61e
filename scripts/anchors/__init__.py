"""Which names of the frameworks the code touches, read from the code and from the wheels. ``tests/anchors`` has the records."""
