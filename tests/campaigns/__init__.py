"""Campaigns that take hours, run by ``make faults`` and ``make soak``. pytest only tests how they judge."""
