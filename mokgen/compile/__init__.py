"""Text to object: one directory of generated modules in, one shared library out. Knows neither spec nor plan."""
