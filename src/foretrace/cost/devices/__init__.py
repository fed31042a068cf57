"""Seconds of calls on a device: measured, learned, roofline."""
