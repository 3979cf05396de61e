"""Campaigns of hours, which ``make faults`` and ``make soak`` run; pytest runs the tests of what judges them."""
