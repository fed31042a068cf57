"""Engines that serve large language models: scheduler, simulator, capacity, calibration."""
