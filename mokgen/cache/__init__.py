"""Content-addressed artifacts on disk: keys, manifest, store. Specs and plans arrive here as plain data."""
