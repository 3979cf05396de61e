"""What the code touches of the frameworks, read out of the code and out of their wheels; ``tests/anchors`` holds the records."""
