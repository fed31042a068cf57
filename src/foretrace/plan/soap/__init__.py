"""Splitting every operator by samples, attributes and parameters and placing its parts (FlexFlow's SOAP space)."""
