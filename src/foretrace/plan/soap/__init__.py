"""Every operator split by samples, attributes and parameters, its parts on any devices (FlexFlow's SOAP space)."""
