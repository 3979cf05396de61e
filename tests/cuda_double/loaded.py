"""Loads the double of a device, before torch, which keeps what it was told about devices."""

from __future__ import annotations

import ctypes
import os

ctypes.CDLL(os.environ["CUDA_DOUBLE"])
